"""Input files as chunks of rows: lines of text or JSON, and tables, which pyarrow reads.

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
import os
import stat
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from embert.server.bulk.job import MAX_ROW_BYTES, BulkError, InputFormat, Job, RowRange, require_pyarrow

STANDARD_INPUT = "-"

_FORMATS: dict[str, InputFormat] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
_READ_BYTES = 1 << 20
_BATCH_ROWS = 1024
_BOM = b"\xef\xbb\xbf"


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
    content: Any  # memoryview of lines, or an Arrow batch
    ends: npt.NDArray[np.int64]  # bytes up to the end of each row

    def split(self, rows: int) -> tuple[_Piece, _Piece]:
        end = int(self.ends[rows - 1])
        if isinstance(self.content, memoryview):
            head, rest = self.content[:end], self.content[end:]
        else:
            head, rest = self.content.slice(0, rows), self.content.slice(rows)
        return (
            _Piece(self.file, self.first, head, self.ends[:rows]),
            _Piece(self.file, self.first + rows, rest, self.ends[rows:] - end),
        )


class Reader(ABC):
    """The rows of several files, one after the other."""

    unit = "row"
    total: int | None = None  # rows of all files, if known
    schema: Any = None  # Arrow schema of the columns of a table

    def __init__(self, files: Sequence[str], job: Job) -> None:
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
        payload = self._payload([piece.content for piece in pieces])
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

    def close(self) -> None:
        """Close the current file. No thread may be reading."""
        self._pieces.close()

    @property
    def name(self) -> str:
        """The files, for error messages."""
        more = f" and {len(self._files) - 1} more files" if len(self._files) > 1 else ""
        return f"{_display_name(self._files[0])}{more}"

    @abstractmethod
    def _read(self) -> Generator[_Piece, None, None]: ...

    @abstractmethod
    def _payload(self, contents: list[Any]) -> bytes | memoryview: ...


class LineReader(Reader):
    """Files of lines."""

    unit = "line"

    def __init__(self, files: Sequence[str], job: Job) -> None:
        """Check that all files can be opened. Raises OSError and BulkError."""
        super().__init__(files, job)
        for file in files:
            if file != STANDARD_INPUT:
                _open_bytes(file).close()

    def peek(self, max_lines: int) -> bytes:
        """The first lines, without consuming them: at most `max_lines`, and about 1 MB."""
        while (
            sum(len(piece.ends) for piece in self._pending) < max_lines
            and sum(len(piece.content) for piece in self._pending) < _READ_BYTES
            and (piece := next(self._pieces, None))
        ):
            self._pending.append(piece)
        return b"".join(
            itertools.islice((line for piece in self._pending for line in io.BytesIO(piece.content)), max_lines)
        )

    def _payload(self, contents: list[Any]) -> bytes | memoryview:
        return contents[0] if len(contents) == 1 else b"".join(contents)

    def _read(self) -> Generator[_Piece, None, None]:
        for file in self._files:
            first = 1
            with contextlib.closing(_open_bytes(file)) as stream:
                for lines in _whole_lines(stream, file):
                    ends = np.flatnonzero(np.frombuffer(lines, np.uint8) == 10) + 1
                    yield _Piece(file, first, memoryview(lines), ends)
                    first += len(ends)


def _whole_lines(stream: BinaryIO, file: str) -> Iterator[bytes]:
    """Some lines at a time, as soon as there are any. Of a line over the limit, the parser gets only that it is."""
    kept: list[bytes] = []  # of an unfinished line
    in_long_line, size = False, 0
    with _errors_named(file):
        read = getattr(stream, "read1", stream.read)
        data = bytes(read(_READ_BYTES)).removeprefix(_BOM)
        while data := data or bytes(read(_READ_BYTES)):
            if in_long_line:
                _, newline, data = data.partition(b"\n")
                in_long_line = not newline
                continue
            end = data.rfind(b"\n") + 1
            if end:
                yield b"".join((*kept, data[:end]))
                kept, size = [], 0
            kept.append(data[end:])
            size += len(kept[-1])
            if size > MAX_ROW_BYTES:
                yield b"".join(kept)[: MAX_ROW_BYTES + 1] + b"\n"
                kept, size, in_long_line = [], 0, True
            data = b""
        if size:
            yield b"".join((*kept, b"\n"))


class TableReader(Reader):
    """CSV and Parquet files: the text's column and those that are kept."""

    def __init__(self, files: Sequence[str], job: Job) -> None:
        """Check the schemas of all files. Raises OSError, BulkError for a column that is missing or not strings."""
        self._pa = require_pyarrow("pyarrow", job.input_format)
        super().__init__(files, job)
        self._delimiter = "\t" if job.input_format == "tsv" else ","
        self._opened: dict[str, tuple[Any, list[str]]] = {}  # standard input can be opened once only
        for file in files:
            if job.input_format == "parquet":
                with self._open_parquet(file) as parquet:
                    self.total = (self.total or 0) + parquet.metadata.num_rows
                    self._check(file, parquet.schema_arrow)
            else:
                stream, names = self._open_csv(file)
                if file == STANDARD_INPUT:
                    self._opened[file] = stream, names
                else:
                    stream.close()
                if names:  # an empty file has no header, and no rows
                    self._check(file, self._pa.schema([(name, self._pa.string()) for name in names]))
        if self.schema is None:  # empty CSV files: the output has the requested columns
            names = [*dict.fromkeys([*(job.kept_columns or ()), job.column])]
            self.schema = self._pa.schema([(name, self._pa.string()) for name in names])

    def _payload(self, contents: list[Any]) -> bytes | memoryview:
        sink = self._pa.BufferOutputStream()
        with self._pa.ipc.new_stream(sink, self.schema) as stream:
            stream.write_batch(contents[0] if len(contents) == 1 else self._pa.concat_batches(contents))
        return memoryview(sink.getvalue())

    def _read(self) -> Generator[_Piece, None, None]:
        read = self._parquet if self._job.input_format == "parquet" else self._csv
        text, schema = self._job.column, self.schema
        compute = require_pyarrow("pyarrow.compute", self._job.input_format)
        for file in self._files:
            row = 1
            try:
                for batch in read(file):
                    columns = [batch.column(name).cast(schema.field(name).type) for name in schema.names]
                    conformed = self._pa.RecordBatch.from_arrays(columns, schema=schema)
                    sizes = compute.fill_null(compute.binary_length(conformed.column(text)), 0)
                    ends = np.cumsum(sizes.to_numpy(zero_copy_only=False), dtype=np.int64)
                    if rows := len(ends):
                        others = conformed.nbytes - conformed.column(text).nbytes  # spread over the rows
                        ends += np.arange(1, rows + 1) * others // rows
                        yield _Piece(file, row, conformed, ends)
                    row += rows
            except (self._pa.ArrowException, OSError) as error:  # pyarrow raises both for damaged files
                after = f" after row {row - 1}" if row > 1 else ""
                raise BulkError(f"{_display_name(file)} cannot be read{after}: {error}") from None

    def _parquet(self, file: str) -> Iterator[Any]:
        with self._open_parquet(file) as parquet:
            for group in range(parquet.num_row_groups):
                metadata = parquet.metadata.row_group(group)
                row_bytes = metadata.total_byte_size // max(1, metadata.num_rows)
                yield from parquet.iter_batches(
                    batch_size=max(1, min(_BATCH_ROWS, MAX_ROW_BYTES // max(1, row_bytes))),
                    row_groups=[group],
                    columns=self.schema.names,
                    use_threads=False,
                )

    def _csv(self, file: str) -> Iterator[Any]:
        reading, names = require_pyarrow("pyarrow.csv", "CSV"), self.schema.names
        stream, header = self._opened.get(file) or self._open_csv(file)
        with contextlib.closing(stream):
            rest = stream.peek(1) if header else b""  # pyarrow refuses a file without rows
            if not rest:
                return
            with reading.open_csv(
                stream,
                # A row must fit into what is read at once.
                read_options=reading.ReadOptions(use_threads=False, block_size=MAX_ROW_BYTES, column_names=header),
                parse_options=reading.ParseOptions(
                    delimiter=self._delimiter,
                    newlines_in_values=True,
                    ignore_empty_lines=len(header) > 1,  # a record of one column may be empty
                ),
                # A CSV file has no types: nothing is guessed from the first rows that later ones could disprove.
                convert_options=reading.ConvertOptions(
                    include_columns=names, column_types=dict.fromkeys(names, self._pa.string()), check_utf8=False
                ),
            ) as batches:
                yield from batches

    def _open_csv(self, file: str) -> tuple[Any, list[str]]:
        """A CSV file after its header, and the names of its columns. Raises BulkError."""
        stream = io.BufferedReader(cast("io.RawIOBase", _open_bytes(file)), _READ_BYTES)
        with _errors_named(file):
            lines = iter(lambda: stream.readline(_READ_BYTES).decode("utf-8-sig", "replace"), "")
            try:
                header = next(filter(None, csv.reader(lines, delimiter=self._delimiter)), [])
            except csv.Error as error:
                raise BulkError(f"{_display_name(file)} has no header of a CSV file: {error}") from None
        return stream, header

    def _open_parquet(self, file: str) -> Any:
        parquet = require_pyarrow("pyarrow.parquet", "Parquet")
        if file == STANDARD_INPUT:
            raise BulkError("Parquet cannot be read from standard input; give the file's name")
        with Path(file).open("rb"):  # Python's error names the file
            pass
        try:
            # Pages are read as they are needed, not a whole row group ahead.
            return parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
        except (self._pa.ArrowException, OSError) as error:
            raise BulkError(f"{file} cannot be read: {error}") from None

    def _check(self, file: str, schema: Any) -> None:
        """Require that a file has the columns, and that they have the first file's types."""
        types, pa, job = self._pa.types, self._pa, self._job
        file = _display_name(file)
        fields = []
        for name in dict.fromkeys([*(schema.names if job.kept_columns is None else job.kept_columns), job.column]):
            count = schema.names.count(name)
            if count != 1:
                option = "--column" if name == job.column else "--keep"
                has = f"{count} columns" if count else "no column"
                known = ", ".join(schema.names) or "none"
                raise BulkError(f"{file} has {has} {name!r}; {option} names one of its columns: {known}")
            type_ = schema.field(name).type
            plain = type_.value_type if types.is_dictionary(type_) else type_
            if str(plain).endswith("_view"):
                plain = pa.string() if str(plain) == "string_view" else pa.binary()
            if name == job.column and plain not in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
                raise BulkError(f"{file}: column {name!r} is {type_}, not strings; --column names another")
            fields.append(pa.field(name, plain))
        columns = pa.schema(fields)
        if self.schema is None:
            self.schema = columns
        elif columns != self.schema:
            expected, actual = next((a, b) for a, b in zip(self.schema, columns, strict=False) if a != b)
            raise BulkError(
                f"{file}: column {actual.name!r} is {actual.type}, and {expected.name!r} is {expected.type} in "
                f"{_display_name(self._files[0])}; all files of a run must have the same columns"
            )


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
    return (LineReader if job.input_format in ("text", "jsonl") else TableReader)(files, job)
