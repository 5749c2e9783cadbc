"""Input files as chunks of rows: lines of text, JSON or CSV, and Parquet, which pyarrow reads.

The rows of a chunk depend on the input and the job alone, so a resumed run makes the same chunks.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import stat
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import orjson

from embert.server.bulk.job import MAX_ROW_BYTES, BulkError, InputFormat, Job, RowRange, require_pyarrow

STANDARD_INPUT = "-"

_FORMATS: dict[str, InputFormat] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
_READ_BYTES = 1 << 20
_PIECE_LINES, _PIECE_ROWS = 256, 1024
_BOM = b"\xef\xbb\xbf"


def expand(names: Sequence[str], output: str | None = None) -> list[str]:
    """Files in the order of the arguments; those of a glob, in the order of their names.

    A glob does not match what the run writes: OUTPUT and the files next to it, files in the folder OUTPUT, or the file
    that standard output goes to. Raises BulkError for a glob without matches, and for such a file by its own name.
    """
    files = []
    for name in names:
        if name == STANDARD_INPUT or not glob.has_magic(name) or Path(name).exists():
            if _is_written(name, output):
                raise BulkError(f"{name} is part of the output: a run cannot read what it writes")
            files.append(name)
            continue
        matches = glob.glob(name, recursive=True)  # noqa: PTH207 - the name may be absolute
        matches = [match for match in sorted(matches) if Path(match).is_file() and not _is_written(match, output)]
        if not matches:
            raise BulkError(f"no file matches {name}" + (f" outside of {output}" if output else ""))
        files += matches
    if files.count(STANDARD_INPUT) > 1:
        raise BulkError("standard input (-) can be read once only")
    if STANDARD_INPUT in files and sys.stdin is None:
        raise BulkError("standard input is closed; --file names a file")
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
    file, target = Path(name).resolve(), Path(output).resolve()
    return target in file.parents if target.is_dir() else file in (target, *partial_files(output))


def partial_files(output: str) -> tuple[Path, Path, Path]:
    """The files that a run into the file `output` writes next to it; see FileWriter."""
    real = os.path.realpath(output)
    return Path(real + ".partial"), Path(real + ".partial.json"), Path(real + ".partial.parquet")


def input_format(files: Sequence[str], override: InputFormat | None) -> InputFormat:
    """The format of all files. Raises BulkError where their names mean several formats, or one that is not read."""
    if override is not None:
        return override
    formats = {_format(file): file for file in reversed(files)}
    if len(formats) > 1:
        examples = " and ".join(f"{file} ({format_})" for format_, file in reversed(formats.items()))
        raise BulkError(f"all files of a run must have one format, found {examples}; --input-format gives it")
    return next(iter(formats))


def _format(file: str) -> InputFormat:
    path = Path(file)
    suffix = (Path(path.stem) if path.suffix.lower() in (".gz", ".zst") else path).suffix.lower()
    if suffix == ".json":
        raise BulkError(f"{file}: JSON is read as lines of one object each; if it is so, add --input-format jsonl")
    return _FORMATS.get(suffix, "text")


def _display_name(file: str) -> str:
    return "standard input" if file == STANDARD_INPUT else file


def _open_bytes(file: str) -> BinaryIO:
    """The bytes of a file, decompressed if its name ends in .gz or .zst. Raises BulkError, OSError."""
    if file == STANDARD_INPUT:
        try:
            descriptor = sys.stdin.fileno()
            if os.isatty(descriptor):
                sys.stderr.write("embert: reading from the terminal; Ctrl-D ends the input\n")
            # Not sys.stdin: a thread that waits for input would hold its lock at the end of the process.
            return open(descriptor, "rb", closefd=False)
        except (OSError, AttributeError):
            return sys.stdin.buffer
    suffix = Path(file).suffix.lower()
    if suffix == ".gz":
        return cast("BinaryIO", gzip.open(file, "rb"))
    if suffix == ".zst":
        pyarrow = require_pyarrow("pyarrow", f"{file}: zstd")
        with Path(file).open("rb"):  # pyarrow's error does not name a folder
            pass
        return cast("BinaryIO", io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(file), "zstd")))
    return Path(file).open("rb")


class Chunk(NamedTuple):
    """Rows of the input, not parsed yet: lines, each with its newline, or an Arrow stream."""

    payload: bytes | memoryview
    rows: int
    ranges: tuple[RowRange, ...]
    digest: str  # SHA-256 of all rows so far


class _Piece(NamedTuple):
    """Consecutive rows of one file."""

    file: str
    first: int  # number of the first row
    rows: Any  # list of lines, or an Arrow batch
    ends: npt.NDArray[np.int64]  # bytes up to the end of each row

    def split(self, rows: int) -> tuple[_Piece, _Piece]:
        head, rest = self.ends[:rows], self.ends[rows:] - self.ends[rows - 1]
        first = self.first + rows
        return self._replace(rows=self.rows[:rows], ends=head), _Piece(self.file, first, self.rows[rows:], rest)


class Reader(ABC):
    """The rows of several files, one after the other."""

    unit = "row"
    total: int | None = None  # rows of all files, if known
    schema: Any = None  # Arrow schema of the columns of Parquet

    def __init__(self, files: Sequence[str], job: Job) -> None:
        """Check that all files can be read. Raises OSError, BulkError for a column that is missing or not strings."""
        self._files, self._job = files, job
        self._hash = hashlib.sha256()
        self._pieces = self._read()
        self._pending: list[_Piece] = []  # read ahead

    def read(self, max_rows: int) -> Chunk | None:
        """The next rows: at most `max_rows` and `block_bytes`, at least one; None at the end.

        Raises BulkError for a file that is damaged, OSError.
        """
        pieces: list[_Piece] = []
        rows = size = 0
        while rows < max_rows and size < self._job.block_bytes:
            piece = self._pending.pop(0) if self._pending else next(self._pieces, None)
            if piece is None:
                break
            count = int(np.searchsorted(piece.ends[: max_rows - rows], self._job.block_bytes - size, side="right"))
            if not count and rows:
                self._pending.insert(0, piece)
                break
            taken, rest = piece.split(max(count, 1))
            if len(rest.ends):
                self._pending.insert(0, rest)
            pieces.append(taken)
            rows, size = rows + len(taken.ends), size + int(taken.ends[-1])
        if not pieces:
            return None
        payload = self._payload([piece.rows for piece in pieces])
        self._hash.update(payload)
        ranges = tuple(RowRange(_display_name(each.file), each.first, len(each.ends), self.unit) for each in pieces)
        return Chunk(payload, rows, ranges, self._hash.hexdigest())

    def chunks(self, shard_rows: int | None = None, completed: int = 0) -> Iterator[Chunk]:
        """All chunks of a run. A chunk ends with a shard, and with the last of the `completed` rows."""
        rows = 0
        while True:
            shard_left = shard_rows - rows % shard_rows if shard_rows else sys.maxsize
            completed_left = completed - rows if rows < completed else sys.maxsize
            if (chunk := self.read(min(self._job.block_texts, shard_left, completed_left))) is None:
                return
            rows += chunk.rows
            yield chunk

    def peek(self, min_rows: int) -> bytes | memoryview:
        """The first rows, without consuming them: `min_rows`, or 1 MB, and a few more."""
        pieces = self._pending
        while (
            sum(len(piece.ends) for piece in pieces) < min_rows
            and sum(piece.ends[-1] for piece in pieces) < _READ_BYTES
        ):
            if (piece := next(self._pieces, None)) is None:
                break
            pieces.append(piece)
        return self._payload([piece.rows for piece in pieces])

    @property
    def name(self) -> str:
        """The files, for error messages."""
        more = f" and {len(self._files) - 1} more files" if len(self._files) > 1 else ""
        return f"{_display_name(self._files[0])}{more}"

    def _read(self) -> Iterator[_Piece]:
        for file in self._files:
            first = 1
            for rows, ends in self._rows(file):
                if len(ends):
                    yield _Piece(file, first, rows, ends)
                first += len(ends)

    def _select(self, file: str, available: Sequence[str]) -> list[str]:
        """The columns to read: the kept ones and the text's. Raises BulkError where the file does not have them."""
        kept = self._job.kept_columns
        names = list(dict.fromkeys([*(available if kept is None else kept), self._job.column]))
        for name in names:
            if (count := available.count(name)) != 1:
                option = "--column" if name == self._job.column else "--keep"
                has = f"{count} columns" if count else "no column"
                known = ", ".join(available) or "none"
                raise BulkError(f"{_display_name(file)} has {has} {name!r}; {option} names one of its columns: {known}")
        return names

    @abstractmethod
    def _rows(self, file: str) -> Iterator[tuple[Any, npt.NDArray[np.int64]]]:
        """Consecutive rows, and the bytes up to the end of each."""

    @abstractmethod
    def _payload(self, pieces: list[Any]) -> bytes | memoryview: ...


class LineReader(Reader):
    """Files of lines of text or JSON. A record of CSV becomes a line of JSON, whose values are strings."""

    def __init__(self, files: Sequence[str], job: Job) -> None:
        super().__init__(files, job)
        self._delimiter = {"csv": ",", "tsv": "\t"}.get(job.input_format)
        self.unit = "row" if self._delimiter else "line"
        for file in files:
            if file != STANDARD_INPUT:
                _open_bytes(file).close()
                if self._delimiter:
                    next(self._rows(file), None)

    def _rows(self, file: str) -> Iterator[tuple[Any, npt.NDArray[np.int64]]]:
        with contextlib.closing(_open_bytes(file)) as stream, _errors_named(file):
            source = self._records(stream, file) if self._delimiter else _lines(stream)
            lines: list[bytes] = []
            for line in source:
                lines.append(line)
                if len(lines) == _PIECE_LINES or len(line) > _READ_BYTES:
                    yield lines, np.cumsum([len(line) for line in lines])
                    lines = []
            yield lines, np.cumsum([len(line) for line in lines], dtype=np.int64)

    def _payload(self, pieces: list[Any]) -> bytes | memoryview:
        return b"".join(itertools.chain.from_iterable(pieces))

    def _records(self, stream: BinaryIO, file: str) -> Iterator[bytes]:
        row = 0
        csv.field_size_limit(MAX_ROW_BYTES)
        # A byte that is not UTF-8 is a surrogate on the way.
        with io.TextIOWrapper(cast("io.BufferedReader", stream), "utf-8-sig", "surrogateescape", newline="") as text:
            records = csv.reader(iter(lambda: text.readline(MAX_ROW_BYTES + 1), ""), delimiter=self._delimiter or ",")
            try:
                names = next(filter(None, records), [])
                wanted = self._select(file, names) if names else []
                for record in records:
                    if not record and len(names) > 1:
                        continue
                    values = record or [""]  # a record of one column may be empty
                    row += 1
                    if len(values) != len(names):
                        count = f"{len(values)} values, and the header has {len(names)}"
                        raise BulkError(f"{_display_name(file)} row {row} has {count}")
                    fields = dict(zip(names, values, strict=True))
                    fields = {name: fields[name] for name in wanted}
                    try:
                        yield orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)
                    except TypeError:  # surrogates
                        yield json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n"
            except csv.Error as error:
                raise BulkError(f"{_display_name(file)} cannot be read after row {row}: {error}") from None


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Lines, each with its end. Of a line over the limit, the parser gets only that it is."""
    bom = _BOM
    while line := stream.readline(MAX_ROW_BYTES + 2):
        has_end = line.endswith(b"\n")
        if line := line.removeprefix(bom):
            yield line if has_end else line[: MAX_ROW_BYTES + 1] + b"\n"
        while not has_end and (rest := stream.readline(_READ_BYTES)):
            has_end = rest.endswith(b"\n")
        bom = b""


class ParquetReader(Reader):
    """Parquet files: the text's column and those that are kept."""

    def __init__(self, files: Sequence[str], job: Job) -> None:
        super().__init__(files, job)
        self._pa = require_pyarrow("pyarrow", "parquet")
        self.total = 0
        for file in files:
            with self._open(file) as parquet:
                self.total += parquet.metadata.num_rows
                self._check(file, parquet.schema_arrow)

    def _check(self, file: str, available: Any) -> None:
        """Require that a file has the columns, and that they have the first file's types."""
        pa = self._pa
        texts = pa.string(), pa.large_string(), pa.binary(), pa.large_binary()
        plain_types = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
        columns = []
        for name in self._select(file, available.names):
            type_ = available.field(name).type
            plain = type_.value_type if pa.types.is_dictionary(type_) else plain_types.get(type_, type_)
            if name == self._job.column and plain not in texts:
                raise BulkError(f"{file}: column {name!r} is {type_}, not strings; --column names another")
            columns.append((name, plain))
        schema = pa.schema(columns)
        self.schema = self.schema or schema
        others = set(zip(schema.names, schema.types, strict=True)) ^ set(
            zip(self.schema.names, self.schema.types, strict=True)
        )
        if others:
            differences = ", ".join(sorted(f"{name!r} of type {type_}" for name, type_ in others))
            raise BulkError(
                f"{file} and {self._files[0]} have different columns: {differences}; --keep names the others"
            )

    def _open(self, file: str) -> Any:
        parquet = require_pyarrow("pyarrow.parquet", "parquet")
        if file == STANDARD_INPUT:
            raise BulkError("Parquet cannot be read from standard input; give the file's name")
        with Path(file).open("rb"):  # Python's error names the file
            pass
        try:
            # Pages are read as they are needed, not a whole row group ahead.
            return parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
        except (self._pa.ArrowException, OSError) as error:
            raise BulkError(f"{file} cannot be read: {error}") from None

    def _rows(self, file: str) -> Iterator[tuple[Any, npt.NDArray[np.int64]]]:
        compute = require_pyarrow("pyarrow.compute", "parquet")
        with self._open(file) as parquet:
            metadata = parquet.metadata
            size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
            batch_rows = max(1, min(_PIECE_ROWS, MAX_ROW_BYTES * metadata.num_rows // max(1, size)))
            try:
                for batch in parquet.iter_batches(batch_rows, columns=self.schema.names, use_threads=False):
                    batch = batch.select(self.schema.names).cast(self.schema)
                    text = batch.column(self._job.column)
                    lengths = compute.fill_null(compute.binary_length(text), 0).to_numpy(zero_copy_only=False)
                    others = np.arange(1, len(lengths) + 1) * (batch.nbytes - text.nbytes) // max(1, len(lengths))
                    yield batch, np.cumsum(lengths, dtype=np.int64) + others  # spread over the rows
            except (self._pa.ArrowException, OSError) as error:  # pyarrow raises both for damaged files
                raise BulkError(f"{file} cannot be read: {error}") from None

    def _payload(self, pieces: list[Any]) -> bytes | memoryview:
        sink = self._pa.BufferOutputStream()
        with self._pa.ipc.new_stream(sink, self.schema) as stream:
            stream.write_batch(self._pa.concat_batches(pieces))
        return memoryview(sink.getvalue())


@contextlib.contextmanager
def _errors_named(file: str) -> Iterator[None]:
    """Add the file's name to errors of reading bytes."""
    try:
        yield
    except (EOFError, zlib.error) as error:
        raise BulkError(f"{_display_name(file)} is damaged or incomplete: {error}") from None
    except OSError as error:  # some of them, such as a bad checksum, name no file
        raise BulkError(f"{_display_name(file)} cannot be read: {error.strerror or error}") from None


def open_input(files: Sequence[str], job: Job) -> Reader:
    """The reader of files of the job's format. Raises OSError and BulkError as the readers do."""
    return (ParquetReader if job.input_format == "parquet" else LineReader)(files, job)
