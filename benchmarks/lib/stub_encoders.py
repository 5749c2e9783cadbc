"""Encoders that cost nothing, to measure the server's own cost. Loaded by `--encoder`."""

from __future__ import annotations

import os
import time

import numpy as np
import numpy.typing as npt

from embert.engine.batch import PackedBatch, TaskOutput, cumulative
from embert.engine.encoders.base import Encoder
from embert.engine.model import Model
from embert.engine.tasks import Task
from embert.server.engine_worker import loop
from embert.server.observability.metrics import EngineMetrics

if "CALL_COUNTER" in os.environ:
    # An engine writes its metrics by the clock. How many requests share that depends on the machine's speed, and the
    # number of calls a request must not.
    loop.IDLE_WRITE_S = EngineMetrics.WRITE_INTERVAL_S = loop.PROBE_INTERVAL_S


class StubEncoder(Encoder):
    """Returns at once the first rows of a table of random unit vectors. An `Encoder`."""

    name = "stub"
    device = "cpu"
    device_name = "none"
    dtype = "float32"
    choice = ""

    def __init__(self, model: Model, *, device: str, dtype: str, max_batch_tokens: int | None) -> None:  # noqa: ARG002
        self.width = model.width
        self.hidden_size = model.config.hidden_size
        self.max_batch_tokens = max_batch_tokens or 16384
        heads = model.heads
        self._columns = {
            Task.EMBED: self.width,
            Task.TOKENS: self.hidden_size,
            Task.CLASSIFY: len(heads.classifier.labels) if heads.classifier else 0,
            Task.MULTI: heads.multi_vector.columns if heads.multi_vector else 0,
        }
        self._tables = {task: self._table(columns) for task, columns in self._columns.items() if task in model.tasks}

    def submit(self, batch: PackedBatch) -> dict[Task, TaskOutput]:
        """Return the rows as the ticket."""
        return {task: self._answer(batch, task) for task in self._tables if task in batch.wanted}

    def _answer(self, batch: PackedBatch, task: Task) -> TaskOutput:
        wanting = batch.sequences_of(task)
        if task in (Task.EMBED, Task.CLASSIFY):
            return TaskOutput.one_each(self._tables[task][: len(wanting)])
        offsets = cumulative(np.diff(batch.cu_seqlens)[wanting])
        return TaskOutput(self._tables[task][: offsets[-1]], offsets)

    def wait(self, ticket: dict[Task, TaskOutput]) -> dict[Task, TaskOutput]:
        return ticket

    def close(self) -> None:
        """Nothing to release."""

    def _table(self, columns: int) -> npt.NDArray[np.float32]:
        rows = np.random.default_rng(0).standard_normal((self.max_batch_tokens, columns), np.float32)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        return rows


class PacedEncoder(StubEncoder):
    """Takes time but no CPU, like a GPU: for overload tests where load and server share cores."""

    TOKENS_PER_S = 6_000.0

    def submit(self, batch: PackedBatch) -> dict[Task, TaskOutput]:
        """Like StubEncoder, after sleeping for the batch's time."""
        time.sleep(batch.tokens / self.TOKENS_PER_S)
        return super().submit(batch)
