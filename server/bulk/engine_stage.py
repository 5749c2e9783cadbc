"""What an engine process does with blocks: token ids to vectors, two batches in flight, from one block to the next.

One thread keeps the encoder busy. Another one may copy what is answered into the blocks' slots meanwhile: for short
texts the copy takes as long as half of the encoder's work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine import Encoder, Model
from embert.engine.batch import PackedBatch, cumulative
from embert.engine.encode_batches import packed, spans
from embert.engine.engine import batch_budget, kept_columns, require_task
from embert.engine.heads.description import kept_rows
from embert.engine.task_output import TaskOutput
from embert.engine.tasks import Task
from embert.engine.tokenization.encoded import Encoded
from embert.server.bulk.input.read_rows import read_rows
from embert.server.bulk.job import Job
from embert.server.bulk.slots import Block, Slots

__all__ = ["Answer", "EngineStage"]

_IN_FLIGHT = 2


@dataclass(slots=True)
class _Open:
    """A block some of whose batches are not answered."""

    block: Block
    values: npt.NDArray[np.float32] | None  # of EMBED: room for the answers, in the slot
    batches: int
    rows: list[TaskOutput] = field(default_factory=list)  # of the other tasks, in the order of the batches


@dataclass(frozen=True, slots=True)
class Answer:
    """What the encoder has answered to a batch. It goes to `EngineStage.land`."""

    opened: _Open
    span: slice  # the batch's texts in the block
    batch: PackedBatch
    rows: TaskOutput


class EngineStage:
    """Encodes blocks, for one job."""

    def __init__(self, job: Job, model: Model, encoder: Encoder, slots: Slots, progress: Callable[[int], None]) -> None:
        """`progress` is called by `land`, after each batch, with the number of its texts.

        Raises InputError for a task that the model does not have, and for too many dimensions.
        """
        require_task(model, job.task)
        self._job, self._model, self._encoder, self._slots = job, model, encoder, slots
        self._columns = kept_columns(model, job.dimensions)
        self._budget = batch_budget(model, encoder)
        self._progress = progress
        self._in_flight: deque[tuple[_Open, slice, PackedBatch, Any]] = deque()

    def feed(self, block: Block) -> Iterator[Answer]:
        """Encode a block; yields answers, of earlier blocks too. Raises EncoderError if a forward fails."""
        slots, job = self._slots, self._job
        ids, lengths = slots.view(block, "ids"), slots.view(block, "lengths")
        types = slots.view(block, "token types") if "token types" in block.sections else None
        places = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=places[1:])
        batches = list(spans(lengths, self._budget))
        values = None
        if job.task == Task.EMBED:
            values = slots.reserve(block, "values", (len(lengths), self._columns), np.float32)
        opened = _Open(block, values, len(batches))
        for span in batches:
            tokens = slice(places[span.start], places[span.stop])
            texts = Encoded(
                ids[tokens],
                lengths[span],
                0,
                None if types is None else types[tokens],
                adapter=block.adapter,
                prompt_tokens=block.prompt_tokens,
            )
            batch = packed(texts, dimensions=job.dimensions or 0, normalize=job.normalize)
            self._in_flight.append((opened, span, batch, self._encoder.submit(batch.wanting(job.task))))
            if len(self._in_flight) == _IN_FLIGHT:
                yield self.finish_one()

    @property
    def is_busy(self) -> bool:
        """Whether a batch is in flight."""
        return bool(self._in_flight)

    def finish_one(self) -> Answer:
        """Wait for the oldest batch in flight."""
        opened, span, batch, ticket = self._in_flight.popleft()
        return Answer(opened, span, batch, self._encoder.wait(ticket)[self._job.task])

    def land(self, answer: Answer) -> Block | None:
        """Put an answer into its slot, all of them in the order of `feed`; the block, if that was its last.

        A row that is not finite is the block's error.

        Its texts are in the order in which they came, longest first.

        values   float32 [B, dimensions]; of the other tasks [rows, columns]
        offsets  int32 [B + 1], of the other tasks: the rows of text i are offsets[i] … offsets[i + 1] - 1
        indices  int32 [rows]: of sparse vectors
        """
        opened = answer.opened
        sequence = answer.rows.first_not_finite()
        if sequence is not None and not opened.block.error:
            opened.block.error = self._not_finite(opened.block, answer.span.start + sequence)
        if opened.values is not None:
            opened.values[answer.span] = answer.rows.values[:, : self._columns]
        else:
            opened.rows.append(self._kept(answer.batch, answer.rows))
        self._progress(answer.batch.sequences)
        opened.batches -= 1
        if opened.batches:
            return None
        if opened.rows:
            self._put(opened.block, opened.rows)
        return opened.block

    def _not_finite(self, block: Block, number: int) -> str:
        """The error for the text of this number, longest first, by its place in the input."""
        text = self._slots.view(block, "numbers").tolist().index(number)
        row = text
        if "payload" in block.sections:
            row = read_rows(self._job, self._slots.data(block, "payload")).rows[text]
        return f"{block.place(row)}: the encoder returned a vector that is not finite"

    def _kept(self, batch: PackedBatch, rows: TaskOutput) -> TaskOutput:
        head = self._model.heads.multi_vector
        if self._job.task != Task.MULTI or head is None:
            return rows
        return rows.where(kept_rows(batch.ids, batch.cu_seqlens, head, is_query=self._job.is_query))

    def _put(self, block: Block, rows: list[TaskOutput]) -> None:
        slots, values = self._slots, [each.values for each in rows]
        shape = sum(map(len, values)), values[0].shape[1]
        np.concatenate(values, out=slots.reserve(block, "values", shape, np.float32))
        slots.put(block, "offsets", cumulative(np.concatenate([each.counts for each in rows])))
        indices = [each.indices for each in rows if each.indices is not None]
        if indices:
            slots.put(block, "indices", np.concatenate(indices))
