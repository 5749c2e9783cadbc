"""What a run does with its texts: the same in every process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embert.engine.tasks import Task

__all__ = ["BLOCK_BYTES", "BulkError", "CannotResume", "InputFormat", "Job", "OutputFormat"]

InputFormat = Literal["text", "jsonl", "csv", "tsv", "parquet"]
OutputFormat = Literal["jsonl", "npy", "parquet"]

# A block ends with so many rows, or so many bytes of texts; a longer text is a block of its own.
BLOCK_TEXTS, BLOCK_BYTES = 4096, 8 << 20  # enough that the texts of a batch are of nearly the same length
MULTI_BLOCK_TEXTS, MULTI_BLOCK_BYTES = 256, 128 << 10  # a vector for every token: some 30 000 of 4 KB


class BulkError(Exception):
    """The input cannot be read, the output cannot be written or resumed, or a process is lost; one sentence."""


class CannotResume(BulkError):
    """What is complete was made from something else, or is damaged; the output adds a way out to the sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything that a vector depends on except the model and the text, and how rows are read and written."""

    task: Task = Task.EMBED  # EMBED, SPARSE or MULTI
    is_query: bool = False  # of MULTI
    adapter: str | None = None
    prompt_name: str | None = None
    normalize: bool = True
    dimensions: int | None = None
    truncate: bool = True
    input_format: InputFormat = "text"
    column: str = "text"
    keep: tuple[str, ...] | None = ()  # columns that go to the output; None: all
    output_format: OutputFormat = "jsonl"
    skip_bad_rows: bool = False
    schema: bytes = b""  # of the kept columns, as Arrow writes it; empty: the output is not Parquet

    @property
    def block_texts(self) -> int:
        """Rows of a block, at most."""
        return MULTI_BLOCK_TEXTS if self.task == Task.MULTI else BLOCK_TEXTS

    @property
    def block_bytes(self) -> int:
        """Bytes of the texts of a block of several, at most."""
        return MULTI_BLOCK_BYTES if self.task == Task.MULTI else BLOCK_BYTES

    @property
    def vector_names(self) -> tuple[str, ...]:
        """The output's own columns."""
        return {Task.SPARSE: ("indices", "values"), Task.MULTI: ("vectors",)}.get(self.task, ("embedding",))

    @property
    def kept(self) -> tuple[str, ...] | None:
        """The input's columns in the output; None: all. An array has none."""
        if self.output_format == "npy":
            return ()
        return (self.column,) if self.keep == () else self.keep
