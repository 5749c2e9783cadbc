"""What an encoder is: packed token ids in (packing.py), float32 vectors out."""

from __future__ import annotations

import enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from embert.engine.errors import EncoderError
from embert.engine.packing import PackedBatch

__all__ = ["Encoder", "Task", "check_dimensions"]


class Task(enum.Enum):
    """What a batch asks for."""

    EMBED = "embed"  # one vector a sequence: pooled, through the model's Dense modules, cut, normalised
    TOKENS = "tokens"  # one vector a token: the last hidden state, unchanged


def check_dimensions(batch: PackedBatch, width: int) -> None:
    """Raise EncoderError where a sequence's `dimensions` are not 0 … width."""
    if batch.dimensions is None:
        return
    (wrong,) = np.nonzero((batch.dimensions < 0) | (batch.dimensions > width))
    if len(wrong):
        found = batch.dimensions[wrong[0]]
        raise EncoderError(f"dimensions of sequence {wrong[0]} must be 0 to {width}, found {found}")


class Encoder(Protocol):
    """Runs batches of one model on one device.

    Used by one thread at a time. Two batches may be in flight: submit N + 1, then wait for N.
    """

    name: str  # "cuda", "torch"
    device: str  # "cpu", "cuda:0"
    device_name: str  # for people: "AMD EPYC", "NVIDIA H100 80GB HBM3"
    dtype: str  # "float32", "float16", "bfloat16"
    width: int  # columns of an EMBED answer
    hidden_size: int  # columns of a TOKENS answer
    max_batch_tokens: int  # the largest T that submit takes
    choice: str  # why load_encoder chose this encoder, for the start-up log; set by load_encoder

    def submit(self, batch: PackedBatch, task: Task = Task.EMBED) -> Any:
        """Start a forward and return a ticket for `wait`. The arrays may be reused as soon as it returns."""
        ...

    def wait(self, ticket: Any) -> npt.NDArray[np.float32]:
        """Return float32 [B, width] for EMBED (columns past `dimensions` are 0), [T, hidden_size] for TOKENS.

        Raises EncoderError if this forward failed, EncoderLost if no later one can work either.
        """
        ...

    def encode(self, batch: PackedBatch, task: Task = Task.EMBED) -> npt.NDArray[np.float32]:
        """Submit and wait."""
        ...

    def close(self) -> None:
        """Release threads and memory. The encoder cannot be used afterwards."""
        ...
