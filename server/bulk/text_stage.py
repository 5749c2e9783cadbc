"""What a text process does with a block: its bytes to token ids, and later its vectors to bytes in the output.

Engines get the texts of a block sorted by length, and leave the vectors in that order. They are put into the order of
the input here, where there are many processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embert.engine import Model, Tokenizer
from embert.engine.batch import cumulative
from embert.engine.encode_batches import by_length, gathered
from embert.engine.engine import encode_texts
from embert.engine.errors import InputError
from embert.engine.task_output import TaskOutput
from embert.engine.tasks import Task
from embert.engine.tokenization.encoded import Encoded
from embert.server.bulk.input.read_rows import ReadRows, read_rows
from embert.server.bulk.job import Job
from embert.server.bulk.output.json_lines import json_lines
from embert.server.bulk.output.place import Place, write_bytes, write_rows
from embert.server.bulk.output.row_group import RowGroups
from embert.server.bulk.slots import Block, Slots

__all__ = ["TextStage"]


class TextStage:
    """Tokenizes and formats blocks, for one job."""

    def __init__(self, job: Job, model: Model) -> None:
        """Load the tokenizer. Raises InputError for an adapter or prompt that the model does not have."""
        self._job, self._model = job, model
        self._tokenizer = Tokenizer(model)
        self._encode([])
        self._row_groups = RowGroups(job, model) if job.output_format == "parquet" else None
        self._rows = np.empty((0, 0), np.float32)

    def prepare(self, block: Block, slots: Slots) -> None:
        """Put a block's token ids into its slot, longest texts first. What is wrong with a row is put into the block.

        ids      int32 [T], of all texts end to end
        lengths  int32 [B], falling
        numbers  int64 [B]: in the order of the input, the number of each among these
        """
        self.prepare_rows(block, slots, read_rows(self._job, slots.data(block, "payload")))

    def finish(self, block: Block, slots: Slots) -> None:
        """Put the bytes of the output into the slot. An array needs none."""
        self.finish_rows(block, slots, read_rows(self._job, slots.data(block, "payload")))

    def write(self, block: Block, slots: Slots, place: Place) -> None:
        """Write a finished block into its file. Raises BulkError where that is not possible."""
        if "output" in block.sections:
            write_bytes(place, slots.data(block, "output"))
        else:
            write_rows(place, slots.view(block, "values"), slots.view(block, "numbers"))

    def prepare_rows(self, block: Block, slots: Slots, read: ReadRows) -> None:
        """As `prepare`, of rows that are read already."""
        if read.bad:
            first = f"{block.place(read.bad[0].row)} {read.bad[0].wrong}"
            if not self._job.skip_bad_rows:
                block.error = first
                return
            block.skipped, block.warning = len(read.bad), first
        try:
            encoded = self._encode(read.texts)
        except InputError as error:
            block.error = self._place(block, read.texts, read.rows, error)
            return
        order = by_length(encoded.lengths)
        packed = gathered(encoded, order, cumulative(encoded.lengths))
        block.texts, block.adapter = encoded.sequences, encoded.adapter
        block.prompt_tokens = encoded.prompt_tokens
        slots.put(block, "ids", packed.ids)
        slots.put(block, "lengths", packed.lengths)
        numbers = np.empty(len(order), np.int64)
        numbers[order] = np.arange(len(order))
        slots.put(block, "numbers", numbers)
        if packed.token_types is not None:
            slots.put(block, "token types", packed.token_types)

    def finish_rows(self, block: Block, slots: Slots, read: ReadRows) -> None:
        """As `finish`, of rows that are read already."""
        vectors = self._vectors(block, slots)
        if self._row_groups is None:
            slots.put(block, "output", json_lines(self._job, read, vectors))
            return
        try:
            content = self._row_groups.row_group(read, vectors)
        except self._row_groups.Unfit as error:
            block.error = f"{block.place(0)} to {block.place(block.rows - 1)}: {error}"
            return
        slots.put(block, "output", content)

    def _vectors(self, block: Block, slots: Slots) -> TaskOutput:
        """The answers of a block, in the order of the input, until the next block's."""
        values, numbers = slots.view(block, "values"), slots.view(block, "numbers")
        if "offsets" in block.sections:
            indices = slots.view(block, "indices") if "indices" in block.sections else None
            return TaskOutput(values, slots.view(block, "offsets"), indices).taken(numbers)
        if len(self._rows) < len(values):  # memory that is used again: new pages cost more than the copy
            self._rows = np.empty(values.shape, np.float32)
        return TaskOutput.one_each(values.take(numbers, axis=0, out=self._rows[: len(values)], mode="clip"))

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

    def _place(self, block: Block, texts: list[str], rows: Sequence[int], error: InputError) -> str:
        """An error of some text, with its file and row."""
        for text, row in zip(texts, rows, strict=True):
            try:
                self._encode([text])
            except InputError as own:
                wrong = str(own).removeprefix("`texts`: text 0 ")
                return f"{block.place(row)} {wrong}"
        return str(error)
