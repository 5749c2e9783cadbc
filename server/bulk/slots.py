"""Shared memory for blocks: a slot holds all that becomes of one block, and is used again for a later one."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Block", "Part", "Section", "Slots"]

_ALIGNMENT = 64
_LEAST_BYTES = 1 << 20


class Section(NamedTuple):
    """An array in a slot."""

    start: int  # bytes
    dtype: str
    shape: tuple[int, ...]


class Part(NamedTuple):
    """Neighboring rows of a block that come from one file."""

    file: str  # as people know it
    first: int  # number of the first row in the file, from 1
    rows: int
    unit: str  # what a row is called


@dataclass(slots=True)
class Block:
    """Rows of the input on their way through the processes. What they hold lies in a slot."""

    number: int  # from 0, in the order of the input
    rows: int  # of the input
    parts: tuple[Part, ...] = ()
    digest: str = ""  # of the input up to the block's end
    texts: int = 0  # rows that are embedded
    adapter: int = -1  # of all texts, as in Encoded
    prompt_tokens: int = 0  # likewise
    skipped: int = 0  # bad rows that were left out …
    warning: str = ""  # … and the first of them
    error: str = ""  # ends the run once everything before this block is written
    slot: int = -1
    used: int = 0  # bytes of the slot
    sections: dict[str, Section] = field(default_factory=dict)

    def place(self, row: int) -> str:
        """Where a row of this block comes from: `FILE line 7`."""
        for part in self.parts:
            if row < part.rows:
                return f"{part.file} {part.unit} {part.first + row}"
            row -= part.rows
        raise IndexError(row)


class Slots:
    """All slots, as one process sees them. Descriptors are inherited, pages are shared and given back at the end."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors = tuple(descriptors)
        self._maps: list[mmap.mmap | None] = [None] * len(descriptors)

    @classmethod
    def create(cls, count: int) -> Slots:
        """New empty slots: anonymous files in memory, which the system removes with the last process that has them."""
        return cls([os.memfd_create("embert-bulk") for _ in range(count)])

    def close(self) -> None:
        """Close the descriptors. Arrays that are still held stay valid."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def reserve(self, block: Block, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Room for an array, its contents undefined."""
        start = -(-block.used // _ALIGNMENT) * _ALIGNMENT
        section = Section(start, np.dtype(dtype).str, shape)
        array = self._array(block.slot, section)
        block.used = start + array.nbytes
        block.sections[name] = section
        return array

    def put(self, block: Block, name: str, content: npt.NDArray[Any] | bytes | memoryview) -> None:
        """Copy an array or bytes into the block's slot."""
        array = content if isinstance(content, np.ndarray) else np.frombuffer(content, np.uint8)
        self.reserve(block, name, array.shape, array.dtype)[...] = array

    def view(self, block: Block, name: str) -> npt.NDArray[Any]:
        """An array of the block, as it lies in its slot: valid until the slot is used again."""
        return self._array(block.slot, block.sections[name])

    def data(self, block: Block, name: str) -> memoryview:
        """The bytes of an array of the block, without a copy."""
        return self.view(block, name).reshape(-1).view(np.uint8).data

    def _array(self, slot: int, section: Section) -> npt.NDArray[Any]:
        dtype = np.dtype(section.dtype)
        count = int(np.prod(section.shape, dtype=np.int64))
        if not count:
            return np.zeros(section.shape, dtype)
        mapped = self._mapped(slot, section.start + count * dtype.itemsize)
        return np.frombuffer(mapped, dtype, count, section.start).reshape(section.shape)

    def _mapped(self, slot: int, end: int) -> mmap.mmap:
        """The slot's memory, at least up to `end`. Growing costs nothing until pages are written."""
        mapped = self._maps[slot]
        if mapped is None or len(mapped) < end:
            descriptor = self.descriptors[slot]
            size = max(os.fstat(descriptor).st_size, _LEAST_BYTES)
            while size < end:
                size *= 2
            if size > os.fstat(descriptor).st_size:
                os.ftruncate(descriptor, size)
            mapped = self._maps[slot] = mmap.mmap(descriptor, size)
        return mapped
