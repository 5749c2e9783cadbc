"""The options of a run, which every process gets, and the errors of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embert.engine.tasks import Task

__all__ = ["BLOCK_BYTES", "BulkError", "CannotResume", "InputFormat", "Job", "OutputFormat"]

InputFormat = Literal["text", "jsonl", "csv", "tsv", "parquet"]
OutputFormat = Literal["jsonl", "npy", "parquet"]

# A block ends after this many rows or bytes of texts; a longer text is a block of its own.
BLOCK_TEXTS, BLOCK_BYTES = 4096, 8 << 20  # enough that the texts of a batch are of nearly the same length
MULTI_BLOCK_TEXTS, MULTI_BLOCK_BYTES = 256, 128 << 10  # one vector per token: about 30 000 of 4 KB


class BulkError(Exception):
    """The input cannot be read, the output cannot be written or resumed, or a process is lost; one sentence."""


class CannotResume(BulkError):
    """The completed part was made from something else, or is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything that a vector depends on except the model and the text, and how rows are read and written."""

    task: Task = Task.EMBED  # EMBED, SPARSE or MULTI
    is_query: bool = False  # for MULTI
    adapter: str | None = None
    prompt_name: str | None = None
    normalize: bool = True
    dimensions: int | None = None
    truncate: bool = True
    input_format: InputFormat = "text"
    column: str = "text"
    keep: tuple[str, ...] | None = ()  # --keep; (): the text's column; None: all columns
    output_format: OutputFormat = "jsonl"
    skip_invalid_rows: bool = False
    schema: bytes = b""  # of the kept columns, serialized by Arrow; empty unless the output is Parquet

    @property
    def block_texts(self) -> int:
        """Maximum number of rows in a block."""
        return MULTI_BLOCK_TEXTS if self.task == Task.MULTI else BLOCK_TEXTS

    @property
    def block_bytes(self) -> int:
        """Maximum bytes of the texts in a block of several."""
        return MULTI_BLOCK_BYTES if self.task == Task.MULTI else BLOCK_BYTES

    @property
    def vector_columns(self) -> tuple[str, ...]:
        """Names of the output's own columns."""
        return {Task.SPARSE: ("indices", "values"), Task.MULTI: ("vectors",)}.get(self.task, ("embedding",))

    @property
    def kept_columns(self) -> tuple[str, ...] | None:
        """Names of the input's columns in the output; None: all. An array has none."""
        if self.output_format == "npy":
            return ()
        return (self.column,) if self.keep == () else self.keep
