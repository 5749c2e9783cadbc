"""Blocks of rows, and the shared memory that holds the data of one block from the reader to the writer."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Block", "RowRange", "SharedBuffers"]

_ALIGNMENT = 64
_MIN_BYTES = 1 << 20


class RowRange(NamedTuple):
    """Consecutive rows of one file."""

    file: str  # as in error messages
    first: int  # number of the first row in the file, from 1
    rows: int
    unit: str  # "line" or "row"


@dataclass(slots=True)
class Block:
    """TaskOutput of the input. The arrays that belong to it lie in a shared buffer."""

    number: int  # from 0, in the order of the input
    rows: int
    ranges: tuple[RowRange, ...] = ()
    digest: str = ""  # SHA-256 of the input up to the end of the block, for inputs of lines
    texts: int = 0  # rows that are embedded
    adapter: int = -1  # of all texts, as in Encoded
    prompt_tokens: int = 0  # likewise
    skipped: int = 0  # invalid rows
    warning: str = ""  # about the first of them
    error: str = ""  # ends the run once the blocks before this one are written
    buffer: int = -1
    used: int = 0  # bytes of the buffer
    arrays: dict[str, tuple[int, str, tuple[int, ...]]] = field(default_factory=dict)  # byte offset, dtype, shape

    def location(self, row: int) -> str:
        """The source of a row of this block, for error messages: `FILE line 7`."""
        for source in self.ranges:
            if row < source.rows:
                return f"{source.file} {source.unit} {source.first + row}"
            row -= source.rows
        raise IndexError(row)


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
