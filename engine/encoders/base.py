"""What an encoder is: packed token ids in, float32 vectors out.

Texts of a batch lie end to end, so there is no padding to describe:

    ids         int32 [T]      all tokens of all sequences
    cu_seqlens  int32 [B + 1]  prefix sums of the lengths: sequence i is ids[cu_seqlens[i]:cu_seqlens[i + 1]]
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from embert.engine.errors import EncoderError

__all__ = ["Encoder", "PackedBatch", "Task", "check_dimensions"]


class Task(enum.Enum):
    """What a batch asks for."""

    EMBED = "embed"  # one vector a sequence: pooled, through the model's dense layers, cut, normalised
    TOKENS = "tokens"  # one vector a token: the last hidden state, as it is


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences laid end to end, each 1 … max_input_length tokens; B may be 0."""

    ids: npt.NDArray[np.int32]  # [T]
    cu_seqlens: npt.NDArray[np.int32]  # [B + 1], starts at 0, strictly increasing, ends at T
    token_types: npt.NDArray[np.int32] | None = None  # [T]; None means all 0
    dimensions: npt.NDArray[np.int32] | None = None  # [B], 1 … width, 0 = all; cut before normalising
    normalize: npt.NDArray[np.bool_] | None = None  # [B]; None means all True

    @property
    def tokens(self) -> int:
        """T, the number of tokens."""
        return int(self.cu_seqlens[-1])

    @property
    def sequences(self) -> int:
        """B, the number of sequences."""
        return len(self.cu_seqlens) - 1


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
    device_name: str  # what a human calls it: "AMD EPYC", "NVIDIA H100 80GB HBM3"
    dtype: str  # "float32", "float16", "bfloat16"
    width: int  # columns of an EMBED answer
    hidden_size: int  # columns of a TOKENS answer
    max_batch_tokens: int  # the largest T that submit takes
    choice: str  # why load_encoder chose this one, for the start-up log; set by load_encoder

    def submit(self, batch: PackedBatch, task: Task = Task.EMBED) -> Any:
        """Start a forward and return a ticket for `wait`; the arrays may be reused as soon as it returns."""
        ...

    def wait(self, ticket: Any) -> npt.NDArray[np.float32]:
        """Return float32 [B, width] for EMBED (columns past `dimensions` are 0), [T, hidden_size] for TOKENS.

        Raises EncoderError when this forward failed, EncoderLost when no later one can work either.
        """
        ...

    def encode(self, batch: PackedBatch, task: Task = Task.EMBED) -> npt.NDArray[np.float32]:
        """Submit and wait."""
        ...

    def close(self) -> None:
        """Give back threads and memory; the encoder cannot be used afterwards."""
        ...
