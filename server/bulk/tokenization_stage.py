"""The work of a tokenization process: text to token ids before encoding, vectors to output bytes after it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embert.engine import Model, Tokenizer
from embert.engine.batch import TaskOutput, cumulative
from embert.engine.encode_batches import by_length, gathered
from embert.engine.engine import encode_texts
from embert.engine.errors import InputError
from embert.engine.tasks import Task
from embert.engine.tokenization.encoded import Encoded
from embert.server.bulk.blocks import Block, SharedBuffers
from embert.server.bulk.job import Job
from embert.server.bulk.output_format import ArrowFormat, ColumnError, json_lines
from embert.server.bulk.rows import ParsedRows, parse

__all__ = ["TokenizationStage"]


class TokenizationStage:
    """Tokenizes and formats blocks."""

    def __init__(self, job: Job, model: Model, buffers: SharedBuffers) -> None:
        """Load the tokenizer. Raises InputError for an adapter or prompt that the model does not have."""
        self._job, self._model, self._buffers = job, model, buffers
        self._tokenizer = Tokenizer(model)
        self._encode([])
        self._arrow = ArrowFormat(job, model) if job.output_format == "parquet" else None

    def parse(self, block: Block) -> ParsedRows:
        """Parse the block's bytes of the input."""
        return parse(self._job, self._buffers.data(block, "payload"))

    def tokenize(self, block: Block, parsed: ParsedRows) -> None:
        """Put the block's token ids into its buffer, longest texts first. Sets `block.error` for an invalid row.

        ids      int32 [T], of all texts end to end
        lengths  int32 [B], descending
        ranks    int64 [B]: for each text in the order of the input, its index in `lengths`
        """
        if parsed.invalid:
            first = f"{block.location(parsed.invalid[0].row)} {parsed.invalid[0].reason}"
            if not self._job.skip_invalid_rows:
                block.error = first
                return
            block.skipped, block.warning = len(parsed.invalid), first
        try:
            encoded = self._encode(parsed.texts)
        except InputError as error:
            block.error = self._locate(block, parsed.texts, parsed.rows, error)
            return
        order = by_length(encoded.lengths)
        packed = gathered(encoded, order, cumulative(encoded.lengths))
        block.texts, block.adapter = encoded.sequences, encoded.adapter
        block.prompt_tokens = encoded.prompt_tokens
        self._buffers.put(block, "ids", packed.ids)
        self._buffers.put(block, "lengths", packed.lengths)
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        self._buffers.put(block, "ranks", ranks)
        if packed.token_types is not None:
            self._buffers.put(block, "token types", packed.token_types)

    def format(self, block: Block, parsed: ParsedRows) -> None:
        """Put the bytes of the output into the buffer. Sets `block.error` for a value that Parquet would change."""
        buffers = self._buffers
        values, ranks = buffers.view(block, "values"), buffers.view(block, "ranks")
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
            content = (
                json_lines(self._job, parsed, vectors) if self._arrow is None else self._arrow.stream(parsed, vectors)
            )
        except ColumnError as error:
            block.error = f"{block.location(error.row)}: {error}"
            return
        buffers.put(block, "output", content)

    def _encode(self, texts: list[str]) -> Encoded:
        job = self._job
        return encode_texts(
            self._model,
            self._tokenizer,
            texts,
            task=job.adapter,
            prompt_name=job.prompt_name,
            truncate=job.truncate,
            is_query=job.is_query if job.task == Task.MULTI else None,
        )

    def _locate(self, block: Block, texts: list[str], rows: Sequence[int], error: InputError) -> str:
        """The error of the first text that has one, with its file and row."""
        for text, row in zip(texts, rows, strict=True):
            try:
                self._encode([text])
            except InputError as own:
                reason = str(own).removeprefix("`texts`: text 0 ")
                return f"{block.location(row)} {reason}"
        return str(error)
