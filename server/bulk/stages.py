"""The stages of a block: texts to token ids, ids to vectors, vectors to bytes of the output.

Two batches are in flight, also from one block to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine import Encoder, Model, Tokenizer
from embert.engine.batch import PackedBatch, TaskOutput, cumulative
from embert.engine.encode_batches import by_length, gathered, packed, spans
from embert.engine.engine import batch_budget, encode_texts, require_task
from embert.engine.errors import InputError
from embert.engine.heads.late_interaction import multi_vector_mask, pooled_texts
from embert.engine.options import output_width
from embert.engine.prefixes import common_prefix, continue_first
from embert.engine.tasks import Task
from embert.engine.tokenization.encoded import Encoded
from embert.engine.tokenization.tokenizer import UNBROKEN_CHARACTERS
from embert.server.bulk.job import Block, Job, SharedBuffers
from embert.server.bulk.rows import ColumnError, Layout, ParsedRows, parse


class TokenizationStage:
    """Tokenizes and formats blocks, each of which it keeps from the one to the other."""

    def __init__(self, job: Job, model: Model, buffers: SharedBuffers) -> None:
        """Load the tokenizer. Raises InputError for an adapter or prompt that the model does not have."""
        self._job, self._model, self._buffers = job, model, buffers
        self._tokenizer = Tokenizer(model, most_unbroken=UNBROKEN_CHARACTERS)
        self._encode([])
        self._layout = Layout(job, model)
        self._parsed: dict[int, ParsedRows] = {}  # by the number of the block

    def tokenize(self, block: Block, parsed: ParsedRows | None = None) -> None:
        """Put the block's token ids into its buffer, longest texts first. Sets `block.error` for an invalid row.

        ids      int32 [T], of all texts end to end
        lengths  int32 [B], descending
        ranks    int64 [B]: for each text in the order of the input, its index in `lengths`
        """
        buffers = self._buffers
        parsed = parsed or parse(self._job, buffers.data(block, "payload"))
        try:
            encoded = self._encode(parsed.texts)
        except InputError:
            parsed.drop(dict(self._refused(parsed)))
            encoded = self._encode(parsed.texts)
        if parsed.invalid:
            row, reason = next(iter(parsed.invalid.items()))
            if not self._job.skip_invalid_rows:
                block.error = f"{block.location(row)} {reason}"
                return
            block.skipped, block.warning = len(parsed.invalid), f"{block.location(row)} {reason}"
        if not parsed.texts:
            return
        self._parsed[block.number] = parsed
        order = by_length(encoded.lengths)
        packed = gathered(encoded, order, cumulative(encoded.lengths))
        block.texts, block.adapter = encoded.sequences, encoded.adapter
        block.prompt_tokens = encoded.prompt_tokens
        buffers.put(block, "ids", packed.ids)
        buffers.put(block, "lengths", packed.lengths)
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        buffers.put(block, "ranks", ranks)
        if packed.token_types is not None:
            buffers.put(block, "token types", packed.token_types)

    def format(self, block: Block) -> None:
        """Put the bytes of the output into the buffer of a block that was tokenized here.

        Sets `block.error` for a vector that is not finite, and for a value that the output cannot hold.
        """
        buffers, parsed = self._buffers, self._parsed.pop(block.number)
        values, ranks = buffers.view(block, "values"), buffers.view(block, "ranks")
        if block.not_finite >= 0:
            row = parsed.rows[ranks.tolist().index(block.not_finite)]
            block.error = f"{block.location(row)}: the encoder returned a vector that is not finite"
            return
        if self._job.output_format == "npy":
            output = buffers.allocate(block, "output", values.shape, np.float32)
            values.take(ranks, axis=0, out=output, mode="clip")  # "raise", the default, would copy once more
            return
        if "offsets" in block.arrays:
            indices = buffers.view(block, "indices") if "indices" in block.arrays else None
            vectors = TaskOutput(values, buffers.view(block, "offsets"), indices).taken(ranks)
        else:
            vectors = TaskOutput.one_each(values[ranks])
        try:
            buffers.put(block, "output", self._layout.format(parsed, vectors))
        except ColumnError as error:
            block.error = f"{block.location(error.row)}: {error}"

    def _encode(self, texts: list[str]) -> Encoded:
        job = self._job
        return encode_texts(
            self._model,
            self._tokenizer,
            texts,
            task=job.adapter,
            prompt_name=job.prompt_name,
            instruction=job.instruction,
            truncate=job.truncate,
            is_query=job.is_query if job.task == Task.MULTI else None,
        )

    def _refused(self, parsed: ParsedRows) -> Iterator[tuple[int, str]]:
        """The rows whose texts cannot be tokenized, and why."""
        for text, row in zip(parsed.texts, parsed.rows, strict=True):
            try:
                self._encode([text])
            except InputError as error:
                yield row, error.reason


_MAX_IN_FLIGHT = 2


@dataclass(slots=True)
class _BlockInFlight:
    """A block with batches that are not finished."""

    block: Block
    values: npt.NDArray[np.float32] | None  # for EMBED: [B, dimensions] in the block's buffer
    batches: int
    rows: list[TaskOutput] = field(default_factory=list)  # for the other tasks, in the order of the batches


class EngineStage:
    """Encodes blocks."""

    def __init__(
        self,
        job: Job,
        model: Model,
        encoder: Encoder,
        buffers: SharedBuffers,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`progress` is called after each batch, with the number of its texts.

        Raises InputError for a task that the model does not have, and for too many dimensions.
        """
        require_task(model, job.task)
        self._job, self._model, self._encoder, self._buffers = job, model, encoder, buffers
        self._columns = output_width(model, job.dimensions)
        self._budget = batch_budget(model, encoder)
        self._progress = progress
        self._in_flight: deque[tuple[_BlockInFlight, slice, PackedBatch, Any]] = deque()

    def encode(self, block: Block) -> Iterator[Block]:
        """Submit the batches of a block; yields blocks that are finished. Raises EncoderError if a forward fails."""
        buffers, job = self._buffers, self._job
        ids, lengths = buffers.view(block, "ids"), buffers.view(block, "lengths")
        types = buffers.view(block, "token types") if "token types" in block.arrays else None
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        shared = 0 if types is not None else common_prefix(ids, lengths, job.task, self._encoder.sharing)
        batches = list(spans(lengths, self._budget, shared, self._encoder.batch_tokens))
        values = None
        if job.task == Task.EMBED:
            values = buffers.allocate(block, "values", (len(lengths), self._columns), np.float32)
        in_flight = _BlockInFlight(block, values, len(batches))
        for span in batches:
            tokens = slice(offsets[span.start], offsets[span.stop])
            texts = Encoded(
                ids[tokens],
                lengths[span],
                0,
                None if types is None else types[tokens],
                adapter=block.adapter,
                prompt_tokens=block.prompt_tokens,
            )
            batch = packed(texts, dimensions=job.dimensions or 0, normalize=job.normalize)
            self._in_flight.append(
                (in_flight, span, batch, self._encoder.submit(continue_first(batch, shared).wanting(job.task)))
            )
            if len(self._in_flight) == _MAX_IN_FLIGHT and (finished := self.finish_batch()):
                yield finished

    def encode_all(self, block: Block) -> None:
        """Encode a block, and wait for it."""
        for _ in self.encode(block):
            pass
        while self.is_busy:
            self.finish_batch()

    @property
    def is_busy(self) -> bool:
        """True if a batch is in flight."""
        return bool(self._in_flight)

    def finish_batch(self) -> Block | None:
        """Wait for the oldest batch; returns its block if that was its last one.

        The block's buffer then has its vectors, in the order of its token ids.

        values   float32 [B, dimensions]; for the other tasks [rows, columns]
        offsets  int32 [B + 1], for the other tasks: text i has the rows offsets[i] … offsets[i + 1] - 1
        indices  int32 [rows]: for sparse vectors
        """
        in_flight, span, batch, ticket = self._in_flight.popleft()
        block, rows = in_flight.block, self._encoder.wait(ticket)[self._job.task]
        sequence = rows.first_not_finite()
        if sequence is not None and block.not_finite < 0:
            block.not_finite = span.start + sequence
        if in_flight.values is not None:
            in_flight.values[span] = rows.values[:, : self._columns]
        else:
            head = self._model.heads.multi_vector
            if self._job.task == Task.MULTI and head is not None:
                is_query = self._job.is_query
                rows = rows.where(multi_vector_mask(batch.ids, batch.cu_seqlens, head, is_query=is_query))
                rows = pooled_texts(rows, head.role(is_query))
            in_flight.rows.append(rows)
        self._progress(batch.sequences)
        in_flight.batches -= 1
        if in_flight.batches:
            return None
        if in_flight.rows:
            rows = TaskOutput.joined(in_flight.rows)
            self._buffers.put(block, "values", rows.values)
            self._buffers.put(block, "offsets", cumulative(rows.counts))
            if rows.indices is not None:
                self._buffers.put(block, "indices", rows.indices)
        return block
