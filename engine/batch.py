"""Input and output of encoders: packed batches, and the rows of each task.

Sequences lie end to end, without padding:

ids         int32 [T]      all tokens of all sequences
cu_seqlens  int32 [B + 1]  prefix sums of the lengths: sequence i is ids[cu_seqlens[i]:cu_seqlens[i + 1]]

A sequence may continue the first tokens of another one, which are in the batch once. With causal attention their rows
are the same in both. Its text has these tokens and then its own: queries attend to the keys of both, and positions go
on. Rows have the same bits as without that.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embert.engine.errors import EncoderError
from embert.engine.tasks import NO_TASK, Task


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """B sequences of T tokens in all, each 1 … max_input_length tokens; B may be 0."""

    ids: npt.NDArray[np.int32]  # [T]
    cu_seqlens: npt.NDArray[np.int32]  # [B + 1], starts at 0, strictly increasing, ends at T
    token_types: npt.NDArray[np.int32] | None = None  # [T]; None means all 0
    dimensions: npt.NDArray[np.int32] | None = None  # [B], 1 … width, 0 = all; cut before normalizing
    normalize: npt.NDArray[np.bool_] | None = None  # [B]; None means all True
    tasks: npt.NDArray[np.uint8] | None = None  # [B], each a combination of Task's flags; None means all EMBED
    adapters: npt.NDArray[np.int8] | None = None  # [B], indices in Adapters.names, -1 for none; None means all -1
    prompt_tokens: npt.NDArray[np.int32] | None = None  # [B], first tokens that are not pooled; None means all 0
    # [B, 2], of the text before a sequence's own tokens: the sequence that begins with it, and its tokens, 0 for none.
    prefixes: npt.NDArray[np.int32] | None = None  # None means all 0
    # [B], of late interaction: queries, which request no task. A document requests CLASSIFY, its score with the last
    # query before it.
    is_query: npt.NDArray[np.bool_] | None = None  # None means that no document is scored

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

    def with_tasks(self, tasks: Task) -> PackedBatch:
        """Returns the batch with these tasks for every sequence."""
        mask = None if tasks == Task.EMBED else np.full(self.sequences, tasks, np.uint8)
        return dataclasses.replace(self, tasks=mask)

    def with_queries(self, is_query: npt.NDArray[np.bool_]) -> PackedBatch:
        """Returns the batch with queries: its other sequences with CLASSIFY are scored with them."""
        tasks = np.full(self.sequences, Task.EMBED, np.uint8) if self.tasks is None else self.tasks
        return dataclasses.replace(self, is_query=is_query, tasks=np.where(is_query, np.uint8(0), tasks))

    def take(self, sequences: npt.NDArray[np.integer]) -> PackedBatch:
        """The sequences of these numbers, in this order: a copy. None has a prefix."""
        lengths = np.diff(self.cu_seqlens)[sequences]
        cu_seqlens = cumulative(lengths)
        tokens = np.repeat(self.cu_seqlens[sequences] - cu_seqlens[:-1], lengths) + np.arange(cu_seqlens[-1])
        arrays = (self.dimensions, self.normalize, self.tasks, self.adapters, self.prompt_tokens)
        of_sequences = (None if array is None else array[sequences] for array in arrays)
        types = None if self.token_types is None else self.token_types[tokens]
        batch = PackedBatch(self.ids[tokens], cu_seqlens, types, *of_sequences)
        return batch if self.is_query is None else dataclasses.replace(batch, is_query=self.is_query[sequences])

    def with_prefixes(self, prefixes: npt.NDArray[np.int32]) -> PackedBatch:
        """Returns the texts with these `prefixes` [B, 2], without the prefixes' tokens in their sequences."""
        lengths, shared = np.diff(self.cu_seqlens), prefixes[:, 1]
        own = np.arange(self.tokens) >= np.repeat(self.cu_seqlens[:-1] + shared, lengths)
        return dataclasses.replace(
            self,
            ids=self.ids[own],
            cu_seqlens=cumulative(lengths - shared),
            token_types=None if self.token_types is None else self.token_types[own],
            prefixes=prefixes,
        )

    def check(self, has: Task, width: int, adapters: int, shares: int = NO_TASK) -> None:
        """Raise EncoderError where a sequence wants what a model with these tasks and adapters does not have.

        A sequence wants at least one task; its `dimensions` are 0 … `width`. One with a prefix wants only tasks of
        `shares`, and the sequence that begins with the prefix has none. A document that is scored follows a query.
        """
        none_wanted = np.zeros(self.sequences, np.bool_)
        if self.is_query is not None:
            if has != Task.MULTI:
                raise EncoderError(f"this model's tasks are {has!r}; the batch has queries, of late interaction")
            documents = self.sequences_of(Task.CLASSIFY)
            (wrong,) = np.nonzero(~np.maximum.accumulate(self.is_query)[documents])
            if len(wrong):
                raise EncoderError(f"sequence {documents[wrong[0]]} has no query before it")
            has, none_wanted = has | Task.CLASSIFY, self.is_query
        if self.prefixes is not None:
            owners, shared = self.prefixes.T
            wants = np.full(self.sequences, Task.EMBED, np.uint8) if self.tasks is None else self.tasks
            wrong = (shared < 0) | (owners < 0) | (owners >= self.sequences)
            owners = np.where(wrong, 0, owners)
            wrong |= (
                (shared > np.diff(self.cu_seqlens)[owners]) | (shared[owners] > 0) | (wants & ~np.uint8(shares) > 0)
            )
            (wrong,) = np.nonzero(wrong & (shared != 0))
            if len(wrong):
                owner, tokens = self.prefixes[wrong[0]]
                raise EncoderError(f"sequence {wrong[0]} cannot continue {tokens} tokens of sequence {owner}")
        if self.tasks is None:
            if Task.EMBED not in has and self.sequences:
                raise EncoderError(f"this model's tasks are {has!r}; the batch wants {Task.EMBED!r}")
        else:
            (wrong,) = np.nonzero(((self.tasks == 0) & ~none_wanted) | (self.tasks & ~np.uint8(has) != 0))
            if len(wrong):
                task = Task(int(self.tasks[wrong[0]]))
                raise EncoderError(f"this model's tasks are {has!r}; sequence {wrong[0]} wants {task!r}")
        if self.dimensions is not None:
            (wrong,) = np.nonzero((self.dimensions < 0) | (self.dimensions > width))
            if len(wrong):
                dimension = self.dimensions[wrong[0]]
                raise EncoderError(f"dimensions of sequence {wrong[0]} must be 0 to {width}, found {dimension}")
        if self.adapters is not None:
            if len(self.adapters) != self.sequences:
                raise EncoderError(f"adapters must have one element a sequence, found {len(self.adapters)}")
            (wrong,) = np.nonzero((self.adapters < -1) | (self.adapters >= adapters))
            if len(wrong):
                adapter = self.adapters[wrong[0]]
                raise EncoderError(f"the adapter of sequence {wrong[0]} must be -1 to {adapters - 1}, found {adapter}")

    def sequences_of(self, task: Task) -> npt.NDArray[np.intp]:
        """The numbers of the sequences that want a task."""
        if self.tasks is None:
            return np.arange(self.sequences if task == Task.EMBED else 0)
        return np.flatnonzero(self.tasks & np.uint8(task))


def cumulative(lengths: npt.NDArray[np.integer] | npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Prefix sums with a leading 0: [B] → int32 [B + 1]."""
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
    """Packs sequences of token ids, each int32 [L], into a batch, in the order given.

    `token_types` has the shapes of `sequences`. The other arrays have one entry a sequence.
    """
    lengths = np.fromiter(map(len, sequences), np.int32, len(sequences))
    return PackedBatch(
        ids=_concatenate(sequences),
        cu_seqlens=cumulative(lengths),
        token_types=None if token_types is None else _concatenate(token_types),
        dimensions=dimensions,
        normalize=normalize,
        tasks=tasks,
        adapters=adapters,
    )


def _concatenate(arrays: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    return np.concatenate(arrays).astype(np.int32, copy=False) if arrays else np.zeros(0, np.int32)


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
    CLASSIFY  one row a sequence: [n, labels], or [n, 1] of documents that are scored with queries
    TOKENS    one row a token: [tokens, hidden_size]
    MULTI     one row a token: [tokens, columns]
    SPARSE    one row a pair: [pairs, 1], with `indices` ascending within a sequence
    TOKEN_CLASSES  one row a token: [tokens, labels]
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

    def take(self, sequences: npt.NDArray[np.integer]) -> TaskOutput:
        """The rows of these sequences, in this order: a copy."""
        counts = self.counts[sequences]
        offsets = cumulative(counts)
        rows = np.repeat(self.offsets[sequences] - offsets[:-1], counts) + np.arange(offsets[-1], dtype=np.int32)
        return TaskOutput(self.values[rows], offsets, None if self.indices is None else self.indices[rows])

    def where(self, mask: npt.NDArray[np.bool_]) -> TaskOutput:
        """The rows where `mask` [R] is true, of the same sequences."""
        indices = None if self.indices is None else self.indices[mask]
        return TaskOutput(self.values[mask], cumulative(mask)[self.offsets], indices)

    def first_not_finite(self) -> int | None:
        """The first sequence with a NaN or an infinity; None: all values are finite. Costs one sum where they are."""
        with np.errstate(invalid="ignore"):  # a sum of both infinities
            if np.isfinite(self.values.sum(dtype=np.float64)):
                return None
        (rows,) = np.nonzero(~np.isfinite(self.values).all(1))
        return int(np.searchsorted(self.offsets, rows[0], side="right")) - 1

    def largest(self, most: int) -> TaskOutput:
        """Keep the `most` largest values of each sequence of SPARSE; the first ones of equals."""
        owners = np.repeat(np.arange(self.sequences), self.counts)
        # A value that is not a number is kept, to be seen.
        values = np.nan_to_num(self.values[:, 0], nan=np.inf)
        order = np.lexsort((-values, owners))
        mask = np.zeros(len(order), np.bool_)
        mask[order] = np.arange(len(order)) - self.offsets[owners] < most
        return self.where(mask)

    def sparse_vectors(self) -> list[SparseVector]:
        """Return the pairs of each sequence of SPARSE. Raises ValueError for the rows of another task."""
        if self.indices is None:
            raise ValueError("only the rows of SPARSE are sparse vectors")
        places = itertools.pairwise(self.offsets.tolist())
        return [SparseVector(self.indices[start:stop], self.values[start:stop, 0]) for start, stop in places]

    @classmethod
    def concatenate(cls, parts: Sequence[TaskOutput]) -> TaskOutput:
        """The rows of several groups of sequences, end to end; at least one group."""
        if len(parts) == 1:
            return parts[0]
        offsets = cumulative(np.concatenate([part.counts for part in parts]))
        indices = [part.indices for part in parts if part.indices is not None]
        return cls(
            np.concatenate([part.values for part in parts]), offsets, np.concatenate(indices) if indices else None
        )
