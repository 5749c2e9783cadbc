"""What an engine process does with blocks: token ids to vectors, two batches in flight, from one block to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine import Encoder, Model
from embert.engine.engine import batch_budget, kept_columns, require_task
from embert.engine.forwards import packed, spans
from embert.engine.heads.multi_vector import kept_rows
from embert.engine.packing import PackedBatch
from embert.engine.rows import Rows
from embert.engine.tasks import Task
from embert.engine.tokenization.encoded import Encoded
from embert.server.bulk.job import Job
from embert.server.bulk.slots import Block, Slots

__all__ = ["EngineStage"]

_IN_FLIGHT = 2


@dataclass(slots=True)
class _Open:
    """A block some of whose batches are not answered."""

    block: Block
    order: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32] | None  # of EMBED: the answers, in the order of the input
    batches: int
    rows: list[Rows] = field(default_factory=list)  # of the other tasks, in the order of the batches


class EngineStage:
    """Encodes blocks, for one job."""

    def __init__(self, job: Job, model: Model, encoder: Encoder, slots: Slots, progress: Callable[[int], None]) -> None:
        """`progress` is called after each batch with the number of its texts.

        Raises InputError for a task that the model does not have, and for too many dimensions.
        """
        require_task(model, job.task)
        self._job, self._model, self._encoder, self._slots = job, model, encoder, slots
        self._columns = kept_columns(model, job.dimensions)
        self._budget = batch_budget(model, encoder)
        self._progress = progress
        self._in_flight: deque[tuple[_Open, slice, PackedBatch, Any]] = deque()

    def feed(self, block: Block) -> Iterator[Block]:
        """Encode a block; yields blocks whose vectors are in their slots. Raises EncoderError if a forward fails.

        values   float32 [B, dimensions], in the order of the input; of the other tasks [rows, columns]
        offsets  int32 [B + 1]: the rows of text i are offsets[i] … offsets[i + 1] - 1
        indices  int32 [rows]: of sparse vectors
        """
        slots, job = self._slots, self._job
        ids, lengths = slots.view(block, "ids"), slots.view(block, "lengths")
        types = slots.view(block, "token types") if "token types" in block.sections else None
        places = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=places[1:])
        batches = list(spans(lengths, self._budget))
        values = None
        if job.task == Task.EMBED:
            values = slots.reserve(block, "values", (len(lengths), self._columns), np.float32)
        opened = _Open(block, slots.view(block, "order"), values, len(batches))
        for span in batches:
            tokens = slice(places[span.start], places[span.stop])
            texts = Encoded(
                ids[tokens], lengths[span], 0, None if types is None else types[tokens], adapter=block.adapter
            )
            batch = packed(texts, dimensions=job.dimensions or 0, normalize=job.normalize)
            self._in_flight.append((opened, span, batch, self._encoder.submit(batch.wanting(job.task))))
            if len(self._in_flight) == _IN_FLIGHT:
                yield from self.finish_one()

    @property
    def is_busy(self) -> bool:
        """Whether a batch is in flight."""
        return bool(self._in_flight)

    def finish_one(self) -> Iterator[Block]:
        """Wait for the oldest batch in flight; yields its block if that was its last."""
        opened, span, batch, ticket = self._in_flight.popleft()
        rows = self._encoder.wait(ticket)[self._job.task]
        if opened.values is not None:
            opened.values[opened.order[span]] = rows.values[:, : self._columns]
        else:
            opened.rows.append(self._kept(batch, rows))
        self._progress(batch.sequences)
        opened.batches -= 1
        if not opened.batches:
            self._close(opened)
            yield opened.block

    def _kept(self, batch: PackedBatch, rows: Rows) -> Rows:
        head = self._model.heads.multi_vector
        if self._job.task != Task.MULTI or head is None:
            return rows
        return rows.where(kept_rows(batch.ids, batch.cu_seqlens, head, is_query=self._job.is_query))

    def _close(self, opened: _Open) -> None:
        block, slots = opened.block, self._slots
        if opened.values is not None:
            slots.put(block, "offsets", np.arange(block.texts + 1, dtype=np.int32))
            return
        rows = Rows.joined(opened.rows).taken(np.argsort(opened.order))
        slots.put(block, "values", rows.values)
        slots.put(block, "offsets", rows.offsets)
        if rows.indices is not None:
            slots.put(block, "indices", rows.indices)
