"""An encoder's output for one task: rows, and the offsets of each sequence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["SparseVector", "TaskOutput"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
_ONE = np.arange(2, dtype=np.int32)  # the offsets of one row
_ONE.flags.writeable = False


@dataclass(frozen=True, slots=True)
class SparseVector:
    """The elements of a vector that are not 0."""

    indices: Ints  # [n], ascending: ids of tokens
    values: Floats  # [n]


@dataclass(frozen=True, slots=True)
class TaskOutput:
    """The rows of n sequences, end to end, in the order of the sequences that want the task.

    EMBED     one row a sequence: [n, width]
    CLASSIFY  one row a sequence: [n, labels]
    TOKENS    one row a token: [tokens, hidden_size]
    MULTI     one row a token: [tokens, columns]
    SPARSE    one row a pair: [pairs, 1], with `indices` ascending within a sequence
    """

    values: Floats  # [R, columns]
    offsets: Ints  # [n + 1]: sequence i has the rows offsets[i] … offsets[i + 1] - 1
    indices: Ints | None = None  # [R], of SPARSE only

    @classmethod
    def one_each(cls, values: Floats) -> TaskOutput:
        """[n, columns]: a row a sequence."""
        return cls(values, _ONE if len(values) == 1 else np.arange(len(values) + 1, dtype=np.int32))

    @property
    def sequences(self) -> int:
        """The number n of sequences."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> Ints:
        """The rows of each sequence: int32 [n]."""
        return np.diff(self.offsets)

    def slice(self, start: int, stop: int) -> TaskOutput:
        """The rows of the sequences `start` … `stop - 1`, without copying them."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        indices = None if self.indices is None else self.indices[first:last]
        return TaskOutput(self.values[first:last], self.offsets[start : stop + 1] - first, indices)

    def taken(self, sequences: npt.NDArray[np.integer]) -> TaskOutput:
        """The rows of these sequences, in this order: a copy."""
        counts = self.counts[sequences]
        offsets = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        rows = np.repeat(self.offsets[sequences] - offsets[:-1], counts) + np.arange(offsets[-1], dtype=np.int32)
        return TaskOutput(self.values[rows], offsets, None if self.indices is None else self.indices[rows])

    def where(self, mask: npt.NDArray[np.bool_]) -> TaskOutput:
        """The rows where `mask` [R] is true, of the same sequences."""
        before = np.zeros(len(mask) + 1, np.int32)
        np.cumsum(mask, out=before[1:])
        indices = None if self.indices is None else self.indices[mask]
        return TaskOutput(self.values[mask], before[self.offsets], indices)

    def first_not_finite(self) -> int | None:
        """The first sequence with a NaN or an infinity; None: all values are finite. Costs one sum where they are."""
        with np.errstate(invalid="ignore"):  # a sum of both infinities
            if np.isfinite(self.values.sum(dtype=np.float64)):
                return None
        (rows,) = np.nonzero(~np.isfinite(self.values).all(1))
        return int(np.searchsorted(self.offsets, rows[0], side="right")) - 1

    def largest(self, most: int) -> TaskOutput:
        """Of SPARSE: the pairs of each sequence with its `most` largest values; the first ones of equals."""
        owners = np.repeat(np.arange(self.sequences), self.counts)
        # A value that is not a number is kept, to be seen.
        values = np.nan_to_num(self.values[:, 0], nan=np.inf)
        order = np.lexsort((-values, owners))
        mask = np.zeros(len(order), np.bool_)
        mask[order] = np.arange(len(order)) - self.offsets[owners] < most
        return self.where(mask)

    def sparse_vectors(self) -> list[SparseVector]:
        """Of SPARSE: the pairs of each sequence. Raises ValueError for the rows of another task."""
        if self.indices is None:
            raise ValueError("only the rows of SPARSE are sparse vectors")
        places = itertools.pairwise(self.offsets.tolist())
        return [SparseVector(self.indices[start:stop], self.values[start:stop, 0]) for start, stop in places]

    @classmethod
    def joined(cls, parts: Sequence[TaskOutput]) -> TaskOutput:
        """The rows of several groups of sequences, end to end; at least one group."""
        if len(parts) == 1:
            return parts[0]
        counts = np.concatenate([part.counts for part in parts])
        offsets = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        indices = [part.indices for part in parts if part.indices is not None]
        return cls(
            np.concatenate([part.values for part in parts]), offsets, np.concatenate(indices) if indices else None
        )
