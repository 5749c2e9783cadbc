"""What stands in an output file around the blocks' bytes: nothing, an array's header, or Parquet's footer.

All three grow at the end, so a file that was cut where a block ends can be continued.
"""

from __future__ import annotations

import io
import os
import struct
from typing import Protocol

import numpy as np

from embert.server.bulk.output.thrift import Struct, read_struct, write_struct

__all__ = ["ArrayFile", "Container", "LinesFile", "ParquetFile"]


class Container(Protocol):
    """One file's frame."""

    section: str  # the name of the blocks' bytes in their slots

    def begin(self) -> bytes:
        """What a new file begins with."""
        ...

    def resume(self, descriptor: int, size: int) -> None:
        """Learn what the first `size` bytes of a file hold. Raises ValueError where they are damaged."""
        ...

    def added(self, content: memoryview, position: int) -> None:
        """Learn of a block's bytes at `position`."""
        ...

    def end(self, rows: int) -> tuple[bytes, bytes]:
        """What replaces the beginning of the file, and what follows at its end."""
        ...


class LinesFile:
    """Blocks and nothing else."""

    section = "output"

    def begin(self) -> bytes:
        """Nothing."""
        return b""

    def resume(self, descriptor: int, size: int) -> None:
        """Nothing is to be known."""

    def added(self, content: memoryview, position: int) -> None:
        """Nothing is to be known."""

    def end(self, rows: int) -> tuple[bytes, bytes]:  # noqa: ARG002 - of the protocol
        """Nothing."""
        return b"", b""


class ArrayFile(LinesFile):
    """A .npy of float32 rows. numpy pads the header, so its length never changes."""

    section = "values"

    def __init__(self, columns: int) -> None:
        self._columns = columns

    def begin(self) -> bytes:
        """The header of no rows yet."""
        return self._header(0)

    def end(self, rows: int) -> tuple[bytes, bytes]:
        """The header of all rows."""
        return self._header(rows), b""

    def _header(self, rows: int) -> bytes:
        header = io.BytesIO()
        shape = rows, self._columns
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
        return header.getvalue()


_MAGIC = b"PAR1"
_TAIL = struct.Struct("<I4s")  # at the end of a Parquet file: bytes of the footer before it, and the magic

# Fields of Parquet's metadata: https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
_ROWS, _ROW_GROUPS = 3, 4  # of FileMetaData
_COLUMNS, _GROUP_OFFSET, _ORDINAL = 1, 5, 7  # of RowGroup
_CHUNK_OFFSET, _CHUNK, _CHUNK_INDICES = 2, 3, (4, 6)  # of ColumnChunk: offset index and column index
_PAGES = (9, 10, 11, 14)  # of ColumnMetaData: where data, an index, a dictionary and a Bloom filter are
_CHUNK_BYTES = 7  # of ColumnMetaData
_STRUCT = 12  # Thrift's type
_MOST_ORDINAL = 1 << 15


class ParquetFile:
    """Whole Parquet files of one row group, end to end, and at last one footer that knows all of their row groups.

    A footer holds positions in the file, and readers look at nothing else. So row groups can be made side by side, in
    several processes, by a library that writes files only, and a file can be continued after a crash.
    """

    section = "output"

    def __init__(self, empty: memoryview) -> None:
        """`empty` is a Parquet file of the same schema without rows."""
        self._empty = read_struct(_footer(empty))
        self._footers: list[tuple[int, bytes]] = []  # of each file within: its position and its footer

    def begin(self) -> bytes:
        """Readers look for these bytes; each block begins with them, too."""
        return _MAGIC

    def added(self, content: memoryview, position: int) -> None:
        """Note the footer."""
        if len(content):
            self._footers.append((position, _footer(content)))

    def resume(self, descriptor: int, size: int) -> None:
        """Find the footers, from the end on."""
        end, found = size, []
        while end > len(_MAGIC):
            length, magic = _TAIL.unpack(os.pread(descriptor, _TAIL.size, end - _TAIL.size))
            footer = os.pread(descriptor, length, end - _TAIL.size - length)
            if magic != _MAGIC or len(footer) != length:
                raise ValueError("no Parquet footer")
            last = _chunks(_groups(read_struct(footer))[0])[-1][_CHUNK][1]
            first_page = min(last[field][1] for field in _PAGES if field in last)
            end -= first_page + last[_CHUNK_BYTES][1] + length + _TAIL.size
            found.append((end, footer))
        if end != len(_MAGIC):
            raise ValueError("no Parquet file")
        self._footers = found[::-1]

    def end(self, rows: int) -> tuple[bytes, bytes]:
        """The footer of all row groups."""
        groups: list[Struct] = []
        for position, footer in self._footers:
            for group in _groups(read_struct(footer)):
                _shift(group, position)
                if _ORDINAL in group:
                    group[_ORDINAL] = group[_ORDINAL][0], len(groups) % _MOST_ORDINAL
                groups.append(group)
        whole = dict(self._empty)
        whole[_ROWS] = whole[_ROWS][0], rows
        whole[_ROW_GROUPS] = whole[_ROW_GROUPS][0], (_STRUCT, groups)
        written = write_struct(whole)
        return b"", written + _TAIL.pack(len(written), _MAGIC)


def _footer(file: memoryview) -> bytes:
    length, _ = _TAIL.unpack(file[-_TAIL.size :])
    return bytes(file[-_TAIL.size - length : -_TAIL.size])


def _groups(footer: Struct) -> list[Struct]:
    groups: list[Struct] = footer[_ROW_GROUPS][1][1]
    return groups


def _chunks(group: Struct) -> list[Struct]:
    chunks: list[Struct] = group[_COLUMNS][1][1]
    return chunks


def _shift(group: Struct, by: int) -> None:
    """Move what a row group points at."""

    def move(struct_: Struct, fields: tuple[int, ...]) -> None:
        for field in fields:
            if field in struct_ and struct_[field][1]:  # 0 is Arrow's word for nowhere
                struct_[field] = struct_[field][0], struct_[field][1] + by

    move(group, (_GROUP_OFFSET,))
    for chunk in _chunks(group):
        move(chunk, (_CHUNK_OFFSET, *_CHUNK_INDICES))
        move(chunk[_CHUNK][1], _PAGES)
