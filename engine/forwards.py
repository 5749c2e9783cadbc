"""Texts through an encoder: batches of texts of similar length, two of them in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from embert.engine.encoders.base import Encoder
from embert.engine.packing import PackedBatch, cumulative
from embert.engine.rows import Rows
from embert.engine.tasks import Task
from embert.engine.tokenization.encoded import Encoded

__all__ = ["forwards"]

Numbers = npt.NDArray[np.intp]  # of texts, as they were given


def forwards(
    encoder: Encoder,
    encoded: Encoded,
    tasks: Task,
    *,
    budget: int,
    dimensions: int = 0,
    normalize: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[Numbers, dict[Task, Rows]]]:
    """Yield the numbers of some texts and the rows of their tasks, in that order, until all texts have theirs.

    `budget` is the most tokens of a batch. `progress` is called after each batch with the number of its texts. Raises
    EncoderError if a forward fails.
    """
    in_flight: tuple[Numbers, object] | None = None

    def finished(numbers: Numbers, ticket: object) -> tuple[Numbers, dict[Task, Rows]]:
        rows = encoder.wait(ticket)
        if progress is not None:
            progress(len(numbers))
        return numbers, rows

    for numbers, batch in _batches(encoded, budget, dimensions, normalize):
        ticket = encoder.submit(batch.wanting(tasks))
        # Submit the next batch before waiting for the last one, so that the device is never idle.
        if in_flight is not None:
            yield finished(*in_flight)
        in_flight = numbers, ticket
    if in_flight is not None:
        yield finished(*in_flight)


def _batches(encoded: Encoded, budget: int, dimensions: int, normalize: bool) -> Iterator[tuple[Numbers, PackedBatch]]:
    """Yield batches of at most `budget` tokens, longest texts first, each with the numbers of its texts."""
    starts = cumulative(encoded.lengths)
    # Longest first: the largest allocations come first, and a progress bar speeds up instead of slowing down.
    order = np.argsort(-encoded.lengths, kind="stable")
    ends = np.cumsum(encoded.lengths[order])
    first = 0
    while first < len(order):
        spent = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, spent + budget, side="right")))
        numbers = order[first:last]
        places = [slice(starts[number], starts[number + 1]) for number in numbers]
        types = encoded.token_types
        yield (
            numbers,
            PackedBatch(
                ids=np.concatenate([encoded.ids[place] for place in places]),
                cu_seqlens=cumulative(encoded.lengths[numbers]),
                token_types=None if types is None else np.concatenate([types[place] for place in places]),
                dimensions=np.full(len(numbers), dimensions, np.int32) if dimensions else None,
                normalize=np.full(len(numbers), normalize, np.bool_),
                adapters=None if encoded.adapter < 0 else np.full(len(numbers), encoded.adapter, np.int8),
            ),
        )
        first = last
