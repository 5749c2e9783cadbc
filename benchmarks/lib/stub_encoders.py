"""Encoders that cost nothing, to measure the server's own cost. Loaded by `--encoder`."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from embert.engine.encoders.base import Task
from embert.engine.model import Model
from embert.engine.packing import PackedBatch

__all__ = ["PacedEncoder", "StubEncoder"]


class StubEncoder:
    """Answers at once with the first rows of a table of random unit vectors. An `Encoder`."""

    name = "stub"
    device = "cpu"
    device_name = "none"
    dtype = "float32"
    choice = ""

    def __init__(self, model: Model, *, device: str, dtype: str, max_batch_tokens: int | None) -> None:  # noqa: ARG002
        self.width = model.width
        self.hidden_size = model.architecture.hidden_size
        self.max_batch_tokens = max_batch_tokens or 16384
        self._tables = {Task.EMBED: self._table(self.width), Task.TOKENS: self._table(self.hidden_size)}

    def submit(self, batch: PackedBatch, task: Task = Task.EMBED) -> npt.NDArray[np.float32]:
        """Return the answer as the ticket."""
        return self._tables[task][: batch.sequences if task is Task.EMBED else batch.tokens]

    def wait(self, ticket: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return float32 [B, width] or [T, hidden_size]."""
        return ticket

    def encode(self, batch: PackedBatch, task: Task = Task.EMBED) -> npt.NDArray[np.float32]:
        """Submit and wait."""
        return self.wait(self.submit(batch, task))

    def close(self) -> None:
        """Nothing to release."""

    def _table(self, columns: int) -> npt.NDArray[np.float32]:
        rows = np.random.default_rng(0).standard_normal((self.max_batch_tokens, columns), np.float32)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        return rows


class PacedEncoder(StubEncoder):
    """Takes time but no CPU, like a GPU: for overload tests where load and server share cores."""

    TOKENS_PER_S = 6_000.0

    def submit(self, batch: PackedBatch, task: Task = Task.EMBED) -> npt.NDArray[np.float32]:
        """As StubEncoder, after sleeping for the batch's time."""
        time.sleep(batch.tokens / self.TOKENS_PER_S)
        return super().submit(batch, task)
