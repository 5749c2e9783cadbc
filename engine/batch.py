"""Packed batches: sequences laid end to end, so there is no padding to describe.

ids         int32 [T]      all tokens of all sequences
cu_seqlens  int32 [B + 1]  prefix sums of the lengths: sequence i is ids[cu_seqlens[i]:cu_seqlens[i + 1]]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embert.engine.tasks import Task

__all__ = ["PackedBatch", "cumulative", "pack"]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """B sequences of T tokens in all, each 1 … max_input_length tokens; B may be 0."""

    ids: npt.NDArray[np.int32]  # [T]
    cu_seqlens: npt.NDArray[np.int32]  # [B + 1], starts at 0, strictly increasing, ends at T
    token_types: npt.NDArray[np.int32] | None = None  # [T]; None means all 0
    dimensions: npt.NDArray[np.int32] | None = None  # [B], 1 … width, 0 = all; cut before normalizing
    normalize: npt.NDArray[np.bool_] | None = None  # [B]; None means all True
    tasks: npt.NDArray[np.uint8] | None = None  # [B], each a combination of Task's flags; None means all EMBED
    adapters: npt.NDArray[np.int8] | None = None  # [B], places in Adapters.names, -1 for none; None means all -1
    prompt_tokens: npt.NDArray[np.int32] | None = (
        None  # [B], number of first tokens that are not pooled; None means all 0
    )

    @property
    def tokens(self) -> int:
        """T, the number of tokens."""
        return int(self.cu_seqlens[-1])

    @property
    def sequences(self) -> int:
        """B, the number of sequences."""
        return len(self.cu_seqlens) - 1

    @property
    def wanted(self) -> Task:
        """The union of the sequences' tasks; EMBED for an empty batch without tasks."""
        return Task.EMBED if self.tasks is None else Task(int(np.bitwise_or.reduce(self.tasks, initial=0)))

    def wanting(self, tasks: Task) -> PackedBatch:
        """The same batch, with these tasks for every sequence."""
        mask = None if tasks == Task.EMBED else np.full(self.sequences, tasks, np.uint8)
        return dataclasses.replace(self, tasks=mask)

    def taken(self, sequences: npt.NDArray[np.integer]) -> PackedBatch:
        """The sequences of these numbers, in this order: a copy."""
        lengths = np.diff(self.cu_seqlens)[sequences]
        cu_seqlens = cumulative(lengths)
        tokens = np.repeat(self.cu_seqlens[sequences] - cu_seqlens[:-1], lengths) + np.arange(cu_seqlens[-1])
        return PackedBatch(
            self.ids[tokens],
            cu_seqlens,
            None if self.token_types is None else self.token_types[tokens],
            None if self.dimensions is None else self.dimensions[sequences],
            None if self.normalize is None else self.normalize[sequences],
            None if self.tasks is None else self.tasks[sequences],
            None if self.adapters is None else self.adapters[sequences],
            None if self.prompt_tokens is None else self.prompt_tokens[sequences],
        )

    def sequences_of(self, task: Task) -> npt.NDArray[np.intp]:
        """The numbers of the sequences that want a task."""
        if self.tasks is None:
            return np.arange(self.sequences if task == Task.EMBED else 0)
        return np.flatnonzero(self.tasks & np.uint8(task))


def cumulative(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Prefix sums with a leading 0: int32 [B] → int32 [B + 1]."""
    cu_seqlens = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    return cu_seqlens


def pack(
    sequences: Sequence[npt.NDArray[np.int32]],
    *,
    token_types: Sequence[npt.NDArray[np.int32]] | None = None,
    dimensions: npt.NDArray[np.int32] | None = None,
    normalize: npt.NDArray[np.bool_] | None = None,
    tasks: npt.NDArray[np.uint8] | None = None,
    adapters: npt.NDArray[np.int8] | None = None,
) -> PackedBatch:
    """One batch of sequences of token ids, each int32 [L], in the order given.

    `token_types` has the shapes of `sequences`. The other arrays have one entry a sequence.
    """
    lengths = np.fromiter(map(len, sequences), np.int32, len(sequences))
    return PackedBatch(
        ids=_joined(sequences),
        cu_seqlens=cumulative(lengths),
        token_types=None if token_types is None else _joined(token_types),
        dimensions=dimensions,
        normalize=normalize,
        tasks=tasks,
        adapters=adapters,
    )


def _joined(arrays: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    return np.concatenate(arrays).astype(np.int32, copy=False) if arrays else np.zeros(0, np.int32)
