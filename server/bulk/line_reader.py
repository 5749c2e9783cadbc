"""Files of lines, text or JSON, as blocks of whole lines.

The bytes of a block are its lines, each with its newline. Which lines make a block depends on the lines alone, so a
resumed run makes the same blocks.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from embert.server.bulk.blocks import Block, RowRange
from embert.server.bulk.input_files import STANDARD_INPUT, display_name, open_bytes
from embert.server.bulk.job import BLOCK_BYTES, BulkError, CannotResume, Job
from embert.server.bulk.rows import parse

__all__ = ["InputChunk", "LineReader", "read_all_lines"]

_READ_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_ROWS_PER_SKIP = 65_536


class InputChunk(NamedTuple):
    """TaskOutput of the input, not parsed yet."""

    payload: bytes
    rows: int
    ranges: tuple[RowRange, ...]
    digest: str  # SHA-256 of all lines so far


class LineReader:
    """The lines of several files, one after the other. Use as a context manager."""

    total: int | None = None  # rows of all files, if known
    identity: list[list[object]] | None = None  # the digest tells whether the lines are the same

    def __init__(self, files: Sequence[str], block_bytes: int = BLOCK_BYTES) -> None:
        """Open the first file, and check that the others can be opened. Raises OSError and BulkError."""
        self._block_bytes = block_bytes
        self._files = list(files)
        self._file: BinaryIO | None = None
        for file in files[1:]:
            if file != STANDARD_INPUT:
                open_bytes(file).close()
        self._hash = hashlib.sha256()
        self._index = -1  # of the current file
        self._line = 0  # lines read from it
        self._data = b""  # complete lines, and the beginning of one
        self._ends = np.zeros(0, np.intp)  # ends of the lines in `_data`, each after its newline
        self._consumed = 0  # number of these lines already read
        self._next_file()

    def peek(self, max_lines: int) -> bytes:
        """The first lines, without consuming them: at most `max_lines`, and about 1 MB."""
        if not self._fill():
            return b""
        while len(self._ends) < max_lines and len(self._data) < _READ_BYTES and (data := self._read()):
            self._set_data(self._data + data)
        return self._data[: int(self._ends[:max_lines][-1])]

    def read(self, max_rows: int) -> InputChunk | None:
        """The next lines: at most `max_rows` and `block_bytes`, at least one; None at the end.

        Raises BulkError for a compressed file that is damaged, OSError.
        """
        pieces: list[bytes] = []
        ranges: list[RowRange] = []
        rows = size = 0
        while rows < max_rows and self._fill():
            start = int(self._ends[self._consumed - 1]) if self._consumed else 0
            ends = self._ends[self._consumed : self._consumed + max_rows - rows]
            count = int(np.searchsorted(ends, start + self._block_bytes - size, side="right"))
            if not count and rows:
                break
            count = max(count, 1)
            piece = self._data[start : int(ends[count - 1])]
            pieces.append(piece)
            ranges.append(RowRange(display_name(self._files[self._index]), self._line + 1, count, "line"))
            self._consumed += count
            self._line += count
            rows += count
            size += len(piece)
        if not rows:
            return None
        payload = b"".join(pieces)
        self._hash.update(payload)
        return InputChunk(payload, rows, tuple(ranges), self._hash.hexdigest())

    def skip(self, rows: int, digest: str) -> None:
        """Skip completed lines. Raises CannotResume where they are not the ones that were embedded."""
        left, actual = rows, self._hash.hexdigest()
        while left and (chunk := self.read(min(left, _ROWS_PER_SKIP))) is not None:
            left, actual = left - chunk.rows, chunk.digest
        if rows and (left or actual != digest):
            names = display_name(self._files[0])
            if len(self._files) > 1:
                names += f" and {len(self._files) - 1} more files"
            raise CannotResume(f"the first {rows} lines of {names} are not those that were embedded")

    def close(self) -> None:
        """Close the current file."""
        if self._file is not None and self._files[self._index] != STANDARD_INPUT:
            self._file.close()

    def __enter__(self) -> LineReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_file(self) -> bool:
        if self._index + 1 >= len(self._files):
            return False
        self.close()
        self._index += 1
        self._line = 0
        self._file = open_bytes(self._files[self._index])
        return True

    def _fill(self) -> bool:
        """Read until there is a complete line; False at the end of the last file."""
        while self._consumed == len(self._ends):
            pieces = [self._data[int(self._ends[-1]) :] if len(self._ends) else self._data]
            self._data, self._ends, self._consumed = b"", self._ends[:0], 0
            data = b""
            while b"\n" not in pieces[-1]:
                data = self._read()
                if self._line == 0 and len(pieces) == 1 and not pieces[0]:
                    data = data.removeprefix(_BOM)
                pieces.append(data or b"\n")
            if not data and not any(pieces[:-1]):  # the file ended with a newline
                if not self._next_file():
                    return False
                continue
            self._set_data(b"".join(pieces))
        return True

    def _set_data(self, data: bytes) -> None:
        self._data = data
        self._ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 10) + 1

    def _read(self) -> bytes:
        """Some bytes of the current file, as soon as there are any; none at its end."""
        assert self._file is not None  # noqa: S101 - opened by the constructor
        file = display_name(self._files[self._index])
        try:
            read = getattr(self._file, "read1", self._file.read)
            return bytes(read(_READ_BYTES))
        except (EOFError, zlib.error) as error:
            raise BulkError(f"{file} is damaged or incomplete: {error}") from None
        except OSError as error:  # some of them, such as a bad checksum, name no file
            raise BulkError(f"{file} cannot be read: {error.strerror or error}") from None


def read_all_lines(file: str) -> list[str]:
    """The lines of a UTF-8 file; `-` is standard input. Raises BulkError for a line that is not UTF-8, OSError."""
    texts: list[str] = []
    with LineReader([file]) as reader:
        while (chunk := reader.read(_ROWS_PER_SKIP)) is not None:
            rows = parse(Job(), memoryview(chunk.payload))
            if rows.invalid:
                location = Block(0, chunk.rows, chunk.ranges).location(rows.invalid[0].row)
                raise BulkError(f"{location} {rows.invalid[0].reason}")
            texts += rows.texts
    return texts
