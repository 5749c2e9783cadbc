"""A run's options, which every process gets, its blocks of rows, and its errors.

The data of one block lie in shared memory, from the reader to the writer.
"""

from __future__ import annotations

import importlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from embert.engine.tasks import Task

InputFormat = Literal["text", "jsonl", "csv", "tsv", "parquet"]
OutputFormat = Literal["jsonl", "npy", "parquet"]

# A block ends after this many rows or bytes; a longer row is a separate block.
BLOCK_TEXTS, BLOCK_BYTES = 4096, 8 << 20  # enough that the texts of a batch are of nearly the same length
MULTI_BLOCK_TEXTS, MULTI_BLOCK_BYTES = 256, 128 << 10  # one vector per token: about 30 000 of 4 KB
MAX_ROW_BYTES = 32 << 20  # of one line, CSV record or text

_VECTOR_COLUMNS = {
    Task.SPARSE: ("indices", "values"),
    Task.MULTI: ("vectors",),
    Task.CLASSIFY: ("labels",),
    Task.TOKEN_CLASSES: ("entities",),
}


class BulkError(Exception):
    """The input cannot be read, the output cannot be written or resumed, or a process is lost; one sentence."""


class CannotResume(BulkError):
    """The completed part was made from something else, or is damaged."""


def require_pyarrow(module: str, feature: str) -> Any:
    """Import a module of pyarrow, an extra. Raises BulkError, with the command that installs it, if it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise BulkError(f"{feature} needs pyarrow: pip install 'embert[bulk]'") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything that a vector depends on except the model and the text, and how rows are read and written."""

    task: Task = Task.EMBED  # EMBED, SPARSE or MULTI; CLASSIFY and TOKEN_CLASSES by ../cli/classify.py only
    is_query: bool = False  # for MULTI
    adapter: str | None = None
    prompt_name: str | None = None
    instruction: str | None = None
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
        """Maximum bytes in a block of several rows."""
        return MULTI_BLOCK_BYTES if self.task == Task.MULTI else BLOCK_BYTES

    @property
    def vector_columns(self) -> tuple[str, ...]:
        """Names of the output's own columns."""
        return _VECTOR_COLUMNS.get(self.task, ("embedding",))

    @property
    def kept_columns(self) -> tuple[str, ...] | None:
        """Names of the input's columns in the output; None: all. An array has none."""
        if self.output_format == "npy":
            return ()
        return (self.column,) if self.keep == () else self.keep


class RowRange(NamedTuple):
    """Consecutive rows of one file."""

    file: str  # as in error messages
    first: int  # number of the first row in the file, from 1
    rows: int
    unit: str  # "line" or "row"


@dataclass(slots=True)
class Block:
    """Rows of the input. The arrays that belong to it lie in a shared buffer."""

    number: int  # from 0, in the order of the input
    rows: int
    ranges: tuple[RowRange, ...] = ()
    digest: str = ""  # SHA-256 of the input up to the end of the block
    texts: int = 0  # rows that are embedded
    adapter: int = -1  # of all texts, as in Encoded
    prompt_tokens: int = 0  # likewise
    skipped: int = 0  # invalid rows
    warning: str = ""  # about the first of them
    not_finite: int = -1  # rank in length of a text whose vector is not finite
    error: str = ""  # ends the run once the blocks before this one are written
    buffer: int = -1
    used: int = 0  # bytes of the buffer
    arrays: dict[str, tuple[int, str, tuple[int, ...]]] = field(default_factory=dict)  # byte offset, dtype, shape

    @property
    def extent(self) -> str:
        """The first and the last row, for error messages."""
        return f"{self.location(0)} to {self.location(self.rows - 1)}"

    def location(self, row: int) -> str:
        """The source of a row of this block, for error messages: `FILE line 7`."""
        for source in self.ranges:
            if row < source.rows:
                return f"{source.file} {source.unit} {source.first + row}"
            row -= source.rows
        raise IndexError(row)


_ALIGNMENT = 64
_MIN_BYTES = 1 << 20


class SharedBuffers:
    """Buffers in shared memory, as one process sees them: anonymous files whose descriptors children inherit."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors = tuple(descriptors)
        self._maps: list[mmap.mmap | None] = [None] * len(descriptors)

    @classmethod
    def create(cls, count: int) -> SharedBuffers:
        """Empty buffers. The system removes them with the last process that has them."""
        return cls([os.memfd_create("embert-bulk") for _ in range(count)])

    def close(self) -> None:
        """Close the descriptors. Arrays that are still referenced stay valid."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def allocate(self, block: Block, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An uninitialized array in the block's buffer."""
        start = -(-block.used // _ALIGNMENT) * _ALIGNMENT
        block.arrays[name] = start, np.dtype(dtype).str, shape
        array = self.view(block, name)
        block.used = start + array.nbytes
        return array

    def put(self, block: Block, name: str, content: npt.NDArray[Any] | bytes | memoryview) -> None:
        """Copy an array or bytes into the block's buffer."""
        array = content if isinstance(content, np.ndarray) else np.frombuffer(content, np.uint8)
        self.allocate(block, name, array.shape, array.dtype)[...] = array

    def view(self, block: Block, name: str) -> npt.NDArray[Any]:
        """An array of the block, without a copy: valid until the buffer gets another block."""
        start, dtype, shape = block.arrays[name]
        count = int(np.prod(shape, dtype=np.int64))
        if not count:
            return np.zeros(shape, dtype)
        mapped = self._mapped(block.buffer, start + count * np.dtype(dtype).itemsize)
        return np.frombuffer(mapped, dtype, count, start).reshape(shape)

    def data(self, block: Block, name: str) -> memoryview:
        """The bytes of an array of the block, without a copy."""
        return self.view(block, name).reshape(-1).view(np.uint8).data

    def output(self, block: Block) -> memoryview:
        """The bytes of the block's output."""
        return self.data(block, "output") if block.texts else memoryview(b"")

    def _mapped(self, buffer: int, end: int) -> mmap.mmap:
        """The buffer's memory, at least up to `end`. Growing costs nothing until pages are written."""
        mapped = self._maps[buffer]
        if mapped is None or len(mapped) < end:
            descriptor = self.descriptors[buffer]
            size = max(os.fstat(descriptor).st_size, _MIN_BYTES)
            while size < end:
                size *= 2
            if size > os.fstat(descriptor).st_size:
                os.ftruncate(descriptor, size)
            mapped = self._maps[buffer] = mmap.mmap(descriptor, size)
        return mapped
