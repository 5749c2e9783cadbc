"""Files of lines, text or JSON, as blocks of whole lines.

A block's bytes are its lines, each with its end; what they say is read by the text processes. Which lines make a block
depends on the lines alone, so a run that goes on makes the blocks that the first one would have made.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from embert.server.bulk.input.paths import STANDARD_INPUT, open_bytes, shown
from embert.server.bulk.job import BLOCK_BYTES, BulkError, CannotResume
from embert.server.bulk.slots import Part

__all__ = ["LineBlocks", "Piece"]

_READ_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_SKIPPED_ROWS = 65_536  # read at once


class Piece(NamedTuple):
    """Rows of the input, as they are handed to a text process."""

    payload: bytes
    rows: int
    parts: tuple[Part, ...]
    digest: str  # SHA-256 of all lines so far


class LineBlocks:
    """The lines of several files, one after the other. Use as a context manager."""

    total: int | None = None  # rows of all files, where known
    identity: list[list[object]] | None = None  # the digest tells whether the lines are the same

    def __init__(self, files: Sequence[str], block_bytes: int = BLOCK_BYTES) -> None:
        """Open the first file, and see that the others can be opened. Raises OSError and BulkError."""
        self._block_bytes = block_bytes
        self._files = list(files)
        self._file: BinaryIO | None = None
        for file in files[1:]:
            if file != STANDARD_INPUT:
                open_bytes(file).close()
        self._hash = hashlib.sha256()
        self._at = -1  # the file that is read
        self._line = 0  # lines of it that were taken
        self._data = b""  # complete lines, and the beginning of one
        self._ends = np.zeros(0, np.intp)  # of the lines in `_data`, each after its newline
        self._taken = 0  # how many of these lines were taken
        self._next_file()

    def peek(self, most: int) -> bytes:
        """The first lines, which `take` gives too: at most `most`, and no more than a read has."""
        if not self._fill():
            return b""
        while len(self._ends) < most and len(self._data) < _READ_BYTES and (data := self._read()):
            self._hold(self._data + data)
        return self._data[: int(self._ends[:most][-1])]

    def take(self, most: int) -> Piece | None:
        """Take a block of at most `most` lines and `block_bytes`, at least one line; None at the end.

        Raises BulkError for a compressed file that is damaged, OSError.
        """
        pieces: list[bytes] = []
        parts: list[Part] = []
        rows = size = 0
        while rows < most and self._fill():
            start = int(self._ends[self._taken - 1]) if self._taken else 0
            ends = self._ends[self._taken : self._taken + most - rows]
            count = int(np.searchsorted(ends, start + self._block_bytes - size, side="right"))
            if not count and rows:
                break
            count = max(count, 1)
            piece = self._data[start : int(ends[count - 1])]
            pieces.append(piece)
            parts.append(Part(shown(self._files[self._at]), self._line + 1, count, "line"))
            self._taken += count
            self._line += count
            rows += count
            size += len(piece)
        if not rows:
            return None
        payload = b"".join(pieces)
        self._hash.update(payload)
        return Piece(payload, rows, tuple(parts), self._hash.hexdigest())

    def skip(self, rows: int, digest: str) -> None:
        """Skip completed lines. Raises CannotResume where they are not the ones that were embedded."""
        left, found = rows, self._hash.hexdigest()
        while left and (piece := self.take(min(left, _SKIPPED_ROWS))) is not None:
            left, found = left - piece.rows, piece.digest
        if rows and (left or found != digest):
            names = shown(self._files[0]) + (f" and {len(self._files) - 1} more files" if len(self._files) > 1 else "")
            raise CannotResume(f"the first {rows} lines of {names} are not those that were embedded")

    def close(self) -> None:
        """Close the file that is open."""
        if self._file is not None and self._files[self._at] != STANDARD_INPUT:
            self._file.close()

    def __enter__(self) -> LineBlocks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_file(self) -> bool:
        if self._at + 1 >= len(self._files):
            return False
        self.close()
        self._at += 1
        self._line = 0
        self._file = open_bytes(self._files[self._at])
        return True

    def _fill(self) -> bool:
        """Read on until there is a line to take; False at the end of the last file."""
        while self._taken == len(self._ends):
            rest = [self._data[int(self._ends[-1]) :] if len(self._ends) else self._data]
            self._data, self._ends, self._taken = b"", self._ends[:0], 0
            ended = False
            while not ended:
                data = self._read()
                if self._line == 0 and len(rest) == 1 and not rest[0]:
                    data = data.removeprefix(_BOM)
                rest.append(data or b"\n")
                ended = b"\n" in rest[-1]
            if not data and not any(rest[:-1]):  # the file ended with a newline
                if not self._next_file():
                    return False
                continue
            self._hold(b"".join(rest))
        return True

    def _hold(self, data: bytes) -> None:
        self._data = data
        self._ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 10) + 1

    def _read(self) -> bytes:
        """Some of the file, as soon as there is any; nothing at its end."""
        assert self._file is not None  # noqa: S101 - the first one is opened at once
        file = shown(self._files[self._at])
        try:
            read = getattr(self._file, "read1", self._file.read)
            return bytes(read(_READ_BYTES))
        except (EOFError, zlib.error) as error:
            raise BulkError(f"{file} is damaged or incomplete: {error}") from None
        except OSError as error:  # some of them, such as a bad checksum, name no file
            raise BulkError(f"{file} cannot be read: {error.strerror or error}") from None
