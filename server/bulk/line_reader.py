"""Input files: which are read, in what format; and files of lines, text or JSON, as blocks of whole lines.

The bytes of a block are its lines, each with its newline. Which lines make a block depends on the lines alone, so a
resumed run makes the same blocks.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import os
import stat
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from embert.server.bulk.job import (
    BLOCK_BYTES,
    MAX_ROW_BYTES,
    BulkError,
    CannotResume,
    InputFormat,
    RowRange,
    require_pyarrow,
)

__all__ = [
    "STANDARD_INPUT",
    "InputChunk",
    "LineReader",
    "display_name",
    "expand",
    "input_format",
    "open_bytes",
    "partial_files",
]

STANDARD_INPUT = "-"

_FORMATS: dict[str, InputFormat] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
_COMPRESSIONS = (".gz", ".zst")


def expand(names: Sequence[str], output: str | None = None) -> list[str]:
    """Files in the order of the arguments; those of a glob, in the order of their names.

    A glob does not match what the run writes: OUTPUT and the files next to it, files in the folder OUTPUT, or the file
    that standard output goes to. Raises BulkError for a glob without matches, and for such a file by its own name.
    """
    files = []
    for name in names:
        if name == STANDARD_INPUT:
            files.append(name)
        elif not glob.has_magic(name) or Path(name).exists():
            if _is_written(name, output):
                raise BulkError(f"{name} is part of the output: a run cannot read what it writes")
            files.append(name)
        else:
            matches = glob.glob(name, recursive=True)  # noqa: PTH207 - the name may be absolute
            matches = sorted(match for match in matches if Path(match).is_file() and not _is_written(match, output))
            if not matches:
                raise BulkError(f"no file matches {name}" + (f" outside of {output}" if output else ""))
            files += matches
    if files.count(STANDARD_INPUT) > 1:
        raise BulkError("standard input (-) can be read once only")
    return files


def _is_written(name: str, output: str | None) -> bool:
    """True if a run into `output` writes the file; without `output`, it writes to standard output."""
    if not Path(name).exists():
        return False
    if output is None:
        try:
            written = os.fstat(sys.stdout.fileno())
        except (OSError, AttributeError):  # closed, or a test's own
            return False
        return stat.S_ISREG(written.st_mode) and os.path.samestat(written, Path(name).stat())
    file, written_path = Path(name).resolve(), Path(output).resolve()
    if written_path.is_dir():
        return written_path in file.parents
    return file in (written_path, *map(Path, partial_files(output)))


def partial_files(output: str) -> tuple[str, str, str]:
    """The files that a run into the file `output` writes next to it."""
    real = os.path.realpath(output)
    return real + ".partial", real + ".partial.json", real + ".partial.parquet"


def input_format(files: Sequence[str], override: InputFormat | None) -> InputFormat:
    """The format of all files. Raises BulkError where their names mean several formats, or one that is not read."""
    if override is not None:
        return override
    formats: dict[InputFormat, str] = {}
    for file in files:
        formats.setdefault(_format(file), file)
    if len(formats) > 1:
        examples = " and ".join(f"{file} ({format_})" for format_, file in formats.items())
        raise BulkError(
            f"all files of a run must have one format, found {examples}; --input-format overrides the names"
        )
    return next(iter(formats))


def _format(file: str) -> InputFormat:
    path = Path(file)
    suffix = (Path(path.stem) if path.suffix.lower() in _COMPRESSIONS else path).suffix.lower()
    if suffix == ".json":
        raise BulkError(f"{file}: JSON is read as lines of one object each; if it is so, add --input-format jsonl")
    return _FORMATS.get(suffix, "text")


def open_bytes(file: str) -> BinaryIO:
    """The bytes of a file, decompressed if its name ends in .gz or .zst. Raises BulkError, OSError."""
    if file == STANDARD_INPUT:
        if sys.stdin is None:
            raise BulkError("standard input is closed; --file names a file")
        try:
            descriptor = sys.stdin.fileno()
            if os.isatty(descriptor):
                sys.stderr.write("embert: reading from the terminal; Ctrl-D ends the input\n")
            # Unbuffered: a thread that waits for input would hold the buffer's lock at the end of the process.
            return open(descriptor, "rb", buffering=0, closefd=False)
        except (OSError, AttributeError):
            return sys.stdin.buffer
    suffix = Path(file).suffix.lower()
    if suffix == ".gz":
        return cast("BinaryIO", gzip.open(file, "rb"))
    if suffix == ".zst":
        pyarrow = require_pyarrow("pyarrow", f"{file}: zstd")
        with Path(file).open("rb"):  # pyarrow's error does not name a folder
            pass
        return cast("BinaryIO", pyarrow.CompressedInputStream(pyarrow.OSFile(file), "zstd"))
    return Path(file).open("rb")


def display_name(file: str) -> str:
    """The file's name in error messages."""
    return "standard input" if file == STANDARD_INPUT else file


_READ_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_ROWS_PER_SKIP = 65_536


class InputChunk(NamedTuple):
    """Rows of the input, not parsed yet."""

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
        self._in_long_line = False  # whose beginning was read, and whose rest is not kept
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
        while rows < max_rows and size < self._block_bytes and self._fill():
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
            if self._in_long_line:
                pieces = [self._after_line()]
            data, size = pieces[0], len(pieces[0])
            while b"\n" not in pieces[-1]:
                if size > MAX_ROW_BYTES:  # the parser refuses it for its length
                    self._in_long_line, data = True, b"\n"
                    pieces = [b"".join(pieces)[: MAX_ROW_BYTES + 1], data]
                    break
                data = self._read()
                if self._line == 0 and len(pieces) == 1 and not pieces[0]:
                    data = data.removeprefix(_BOM)
                pieces.append(data or b"\n")
                size += len(data)
            if not data and not any(pieces[:-1]):  # the file ended with a newline
                if not self._next_file():
                    return False
                continue
            self._set_data(b"".join(pieces))
        return True

    def _after_line(self) -> bytes:
        """Read to the end of the current line; returns what follows it."""
        self._in_long_line = False
        while data := self._read():
            _, newline, rest = data.partition(b"\n")
            if newline:
                return rest
        return b""

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
