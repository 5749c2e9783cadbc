"""The stages of a block: texts to token ids, ids to vectors, vectors to bytes of the output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from embert.engine import Encoder, Model, Tokenizer
from embert.engine.batch import PackedBatch, TaskOutput, cumulative
from embert.engine.encode_batches import Numbers, form_batches, run_batches
from embert.engine.engine import batch_budget, encode_texts
from embert.engine.errors import InputError
from embert.engine.heads.late_interaction import multi_vector_mask, pool_texts
from embert.engine.options import output_width, require_tasks
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
        """Put the block's token ids into its buffer. Sets `block.error` for an invalid row.

        ids      int32 [T], of all texts end to end
        lengths  int32 [B]
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
            block.skipped, block.warning = len(parsed.invalid), f"{block.location(row)} {reason}"
            if not self._job.skip_invalid_rows:
                block.error = block.warning
                return
        if not parsed.texts:
            return
        self._parsed[block.number] = parsed
        block.texts, block.adapter, block.prompt_tokens = encoded.sequences, encoded.adapter, encoded.prompt_tokens
        buffers.put(block, "ids", encoded.ids)
        buffers.put(block, "lengths", encoded.lengths)
        if encoded.token_types is not None:
            buffers.put(block, "token types", encoded.token_types)

    def format(self, block: Block) -> None:
        """Put the bytes of the output into the buffer of a block that was tokenized here.

        Sets `block.error` for a vector that is not finite, and for a value that the output cannot hold.
        """
        buffers, parsed = self._buffers, self._parsed.pop(block.number)
        if block.not_finite >= 0:
            location = block.location(parsed.rows[block.not_finite])
            block.error = f"{location}: the encoder returned a vector that is not finite"
            return
        if self._job.output_format == "npy":
            block.arrays["output"] = block.arrays["values"]
            return
        values, indices = buffers.view(block, "values"), None
        if "indices" in block.arrays:
            indices = buffers.view(block, "indices")
        is_rows = "offsets" in block.arrays
        vectors = (
            TaskOutput(values, buffers.view(block, "offsets"), indices) if is_rows else TaskOutput.one_each(values)
        )
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
        require_tasks(model, job.task)
        self._job, self._model, self._encoder, self._buffers = job, model, encoder, buffers
        self._columns = output_width(model, job.dimensions)
        self._budget = batch_budget(model, encoder)
        self._progress = progress

    def encode(self, blocks: Iterable[Block | None]) -> Iterator[Block]:
        """Yield blocks whose buffers have their vectors. None in place of a block: finish the blocks before it.

        Raises EncoderError if a forward fails.

        values   float32 [B, dimensions]; for the tasks but EMBED [rows, columns]
        offsets  int32 [B + 1], for the other tasks: text i has the rows offsets[i] … offsets[i + 1] - 1
        indices  int32 [rows]: for sparse vectors
        """
        parts: list[tuple[Numbers, TaskOutput]] = []  # of a block, for the other tasks
        for (block, numbers, is_last), outputs in run_batches(self._encoder, self._batches(blocks)):
            rows = outputs[self._job.task]
            sequence = rows.first_not_finite()
            if sequence is not None and block.not_finite < 0:
                block.not_finite = int(numbers[sequence])
            if self._job.task == Task.EMBED:
                self._buffers.view(block, "values")[numbers] = rows.values[:, : self._columns]
            else:
                parts.append((numbers, rows))
            self._progress(len(numbers))
            if is_last:
                if parts:
                    self._put(block, parts)
                    parts = []
                yield block

    def _batches(
        self, blocks: Iterable[Block | None]
    ) -> Iterator[tuple[tuple[Block, Numbers, bool], PackedBatch] | None]:
        """All batches, each with its block, the indices of its texts, and whether it is the block's last one."""
        job = self._job
        for block in blocks:
            if block is None:
                yield None
                continue
            if job.task == Task.EMBED:
                self._buffers.allocate(block, "values", (block.texts, self._columns), np.float32)
            types = self._buffers.view(block, "token types") if "token types" in block.arrays else None
            ids, lengths = self._buffers.view(block, "ids"), self._buffers.view(block, "lengths")
            encoded = Encoded(ids, lengths, 0, types, block.adapter, block.prompt_tokens)
            options = {"budget": self._budget, "dimensions": job.dimensions or 0}
            left = block.texts
            for numbers, batch in form_batches(self._encoder, encoded, job.task, **options, normalize=job.normalize):
                left -= len(numbers)
                yield (block, numbers, not left), batch

    def _put(self, block: Block, parts: list[tuple[Numbers, TaskOutput]]) -> None:
        """Put the rows of all texts into the block's buffer, in the order of the texts."""
        buffers, head = self._buffers, self._model.heads.multi_vector
        order = np.concatenate([numbers for numbers, _ in parts])
        rows = TaskOutput.concatenate([rows for _, rows in parts]).take(np.argsort(order))
        if self._job.task == Task.MULTI and head is not None:
            starts, is_query = cumulative(buffers.view(block, "lengths")), self._job.is_query
            rows = rows.where(multi_vector_mask(buffers.view(block, "ids"), starts, head, is_query=is_query))
            rows = pool_texts(rows, head.role(is_query))
        buffers.put(block, "values", rows.values)
        buffers.put(block, "offsets", cumulative(rows.counts))
        if rows.indices is not None:
            buffers.put(block, "indices", rows.indices)
