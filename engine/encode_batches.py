"""Runs texts through an encoder: batches of similar length, two of them in flight."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from embert.engine.batch import PackedBatch, TaskOutput, cumulative
from embert.engine.encoders.base import Encoder
from embert.engine.prefixes import common_prefix, continue_first
from embert.engine.tasks import Task
from embert.engine.tokenization.encoded import Encoded, concatenate

Key = TypeVar("Key")
Numbers = npt.NDArray[np.intp]  # of texts, as they were given


def encode_batches(
    encoder: Encoder,
    encoded: Encoded,
    tasks: Task,
    *,
    budget: int,
    dimensions: int = 0,
    normalize: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[Numbers, dict[Task, TaskOutput]]]:
    """Yield the indices of some texts with their rows, in the same order, until all texts are encoded.

    `budget` is the most tokens of a batch. `progress` is called after each batch with the number of its texts. Raises
    EncoderError if a forward fails.
    """
    batches = form_batches(encoder, encoded, tasks, budget=budget, dimensions=dimensions, normalize=normalize)
    for numbers, rows in run_batches(encoder, batches):
        if progress is not None:
            progress(len(numbers))
        yield numbers, rows


def form_batches(
    encoder: Encoder, encoded: Encoded, tasks: Task, *, budget: int, dimensions: int, normalize: bool
) -> Iterator[tuple[Numbers, PackedBatch]]:
    """Yield the indices of some texts with their batch, until all texts are in one."""
    # Longest first: the largest allocations come first, and a progress bar speeds up instead of slowing down.
    order, starts = by_length(encoded.lengths), cumulative(encoded.lengths)
    shared = 0
    if encoded.token_types is None:
        shared = common_prefix(encoded.ids, encoded.lengths, tasks, encoder.sharing)
    for span in spans(encoded.lengths[order], budget, shared, encoder.batch_tokens):
        batch = form_batch(gather(encoded, order[span], starts), dimensions=dimensions, normalize=normalize)
        yield order[span], continue_first(batch, shared).with_tasks(tasks)


def score_batches(
    encoder: Encoder, queries: Encoded, documents: Encoded, *, budget: int
) -> Iterator[tuple[Numbers, PackedBatch]]:
    """Yield the indices of some documents with their batch, until all are in one.

    A document is scored with the query of its index, or with the only one, which each batch has once.
    """
    count, both = queries.sequences, concatenate((queries, documents))
    lengths, starts = queries.lengths + documents.lengths, cumulative(both.lengths)
    order, shared = by_length(lengths), int(queries.lengths[0]) if count == 1 else 0
    for span in spans(lengths[order], budget, shared, encoder.batch_tokens):
        numbers = order[span]
        sequences = np.concatenate([[0], 1 + numbers])
        if count > 1:
            sequences = np.stack([numbers, count + numbers], 1).reshape(-1)
        batch = form_batch(gather(both, sequences, starts), dimensions=0, normalize=True)
        yield numbers, batch.with_tasks(Task.CLASSIFY).with_queries(sequences < count)


def run_batches(
    encoder: Encoder, batches: Iterable[tuple[Key, PackedBatch] | None]
) -> Iterator[tuple[Key, dict[Task, TaskOutput]]]:
    """Yield each key with the rows of its batch. None in place of a batch: wait for the batch before it.

    Submits the next batch before it waits for the last one, so that the device is never idle.
    """
    in_flight: tuple[Key, object] | None = None
    for item in itertools.chain(batches, (None,)):
        submission = None if item is None else (item[0], encoder.submit(item[1]))
        if in_flight is not None:
            yield in_flight[0], encoder.wait(in_flight[1])
        in_flight = submission


def by_length(lengths: npt.NDArray[np.int32]) -> Numbers:
    """The numbers of texts, longest first; equals in the order given."""
    return np.argsort(-lengths, kind="stable")


def spans(lengths: npt.NDArray[np.int32], budget: int, shared: int = 0, usual: int = 0) -> Iterator[slice]:
    """Cut a list of texts into batches of at most `budget` tokens; a longer text gets its own batch.

    The first `shared` tokens are common to all texts, and a batch has them once. Batches with a prefix have at most
    `usual` tokens, or twice the prefix: a CPU takes them through its layers in one piece.
    """
    if shared:
        budget = min(budget, max(usual, 2 * shared)) - shared
    ends = np.cumsum(lengths - shared, dtype=np.int64)
    first = 0
    while first < len(ends):
        spent = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, spent + budget, side="right")))
        yield slice(first, last)
        first = last


def gather(encoded: Encoded, numbers: Numbers, starts: npt.NDArray[np.int32]) -> Encoded:
    """Copies some of the texts, in the order of their `numbers`; `starts` are the prefix sums of all lengths."""
    lengths = encoded.lengths[numbers]
    shifts = starts[numbers] - cumulative(lengths)[:-1]
    places = np.repeat(shifts, lengths) + np.arange(lengths.sum(dtype=np.int64))
    types = encoded.token_types
    return dataclasses.replace(
        encoded, ids=encoded.ids[places], lengths=lengths, token_types=None if types is None else types[places]
    )


def form_batch(encoded: Encoded, *, dimensions: int, normalize: bool) -> PackedBatch:
    """Forms a batch of all the texts. `dimensions` of 0 are all."""
    count = encoded.sequences
    return PackedBatch(
        ids=encoded.ids,
        cu_seqlens=cumulative(encoded.lengths),
        token_types=encoded.token_types,
        dimensions=np.full(count, dimensions, np.int32) if dimensions else None,
        normalize=np.full(count, normalize, np.bool_),
        adapters=None if encoded.adapter < 0 else np.full(count, encoded.adapter, np.int8),
        prompt_tokens=np.full(count, encoded.prompt_tokens, np.int32) if encoded.prompt_tokens else None,
    )
