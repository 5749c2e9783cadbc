"""Parquet and CSV files, read by pyarrow, as blocks of rows. A block's bytes are an Arrow stream of one batch."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from embert.server.bulk.job import BulkError, CannotResume, Job, RowRange, require_pyarrow
from embert.server.bulk.line_reader import STANDARD_INPUT, InputChunk, LineReader, display_name, open_bytes

__all__ = ["Reader", "TableReader", "open_input"]

_BATCH_ROWS = 1024  # of long texts, these may be many bytes
_CSV_BYTES = 32 << 20  # read at once: no row may be longer
_HEADER_BYTES = 1 << 20


class _CsvFile(io.RawIOBase):
    """The bytes of a CSV file from its beginning, though its header was read already."""

    def __init__(self, stream: BinaryIO, delimiter: str) -> None:
        self._stream = stream
        head = bytearray()
        while b"\n" not in head and len(head) < _HEADER_BYTES and (data := stream.read(65536)):
            head = bytearray((head + data).lstrip(b"\r\n"))  # blank lines are no header
        if b"\n" not in head and len(head) < _HEADER_BYTES:  # pyarrow wants a header to end
            head += b"\n"
        self._head = memoryview(bytes(head))
        text = head.decode("utf-8-sig", "replace")
        self.names = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), []) if text.strip() else []

    def readable(self) -> bool:
        """Whether it can be read: always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes."""
        view = memoryview(buffer).cast("B")
        data = self._head[: len(view)] or self._stream.read(len(view))
        self._head = self._head[len(data) :] if self._head else self._head
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._stream.close()
        super().close()


class TableReader:
    """The rows of several files, one after the other: the text's column and those that are kept."""

    def __init__(self, files: Sequence[str], job: Job) -> None:
        """Check the schemas of all files. Raises OSError, BulkError for a column that is missing or not strings."""
        self._pa = require_pyarrow("pyarrow", job.input_format)
        self._files, self._job = list(files), job
        self._is_parquet = job.input_format == "parquet"
        self.total: int | None = 0 if self._is_parquet else None
        self.schema: Any = None  # of the columns that are read
        self._delimiter = "\t" if job.input_format == "tsv" else ","
        self._standard_input: _CsvFile | None = None
        for file in files:
            self._check(file)
        if self.schema is None:  # empty CSV files: nothing is read, and the output has the columns asked for
            names = dict.fromkeys([*(job.kept_columns or ()), job.column])
            self.schema = self._pa.schema([(name, self._pa.binary()) for name in names])
        self._pending: list[tuple[int, int, Any]] = []  # file, number of the first row, batch
        self._batches = self._read(0)

    @property
    def identity(self) -> list[list[object]] | None:
        """What tells these files from others: name, size and time of change of each."""
        stats = [(file, Path(file).stat()) for file in self._files if file != STANDARD_INPUT]
        return [[file, stat.st_size, stat.st_mtime_ns] for file, stat in stats]

    def skip(self, rows: int, digest: str) -> None:  # noqa: ARG002 - the identity of the files was compared
        """Skip completed rows. Raises CannotResume for standard input."""
        if rows and STANDARD_INPUT in self._files:
            raise CannotResume("nothing tells whether standard input is the same as it was")
        self._batches = self._read(rows)

    def read(self, max_rows: int) -> InputChunk | None:
        """The next rows: at most `max_rows` rows and `block_bytes` of texts, at least one; None at the end."""
        limit = self._job.block_bytes
        sizes = [self._sizes(batch) for _, _, batch in self._pending]
        while sum(map(len, sizes)) < max_rows and sum(batch.sum() for batch in sizes) <= limit:
            if (item := next(self._batches, None)) is None:
                break
            self._pending.append(item)
            sizes.append(self._sizes(item[2]))
        if not sizes:
            return None
        rows = max(1, int(np.searchsorted(np.cumsum(np.concatenate(sizes)[:max_rows]), limit, side="right")))
        batches, ranges = [], []
        left = rows
        while left:
            file, first, batch = self._pending.pop(0)
            if batch.num_rows > left:
                self._pending.insert(0, (file, first + left, batch.slice(left)))
                batch = batch.slice(0, left)
            batches.append(batch)
            ranges.append(RowRange(display_name(self._files[file]), first, batch.num_rows, "row"))
            left -= batch.num_rows
        sink = self._pa.BufferOutputStream()
        with self._pa.ipc.new_stream(sink, self.schema) as stream:
            stream.write_batch(batches[0] if len(batches) == 1 else self._pa.concat_batches(batches))
        return InputChunk(sink.getvalue(), rows, tuple(ranges), "")

    def close(self) -> None:
        """End reading."""
        self._batches.close()

    def __enter__(self) -> TableReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sizes(self, batch: Any) -> Any:
        """Bytes of each text: int64 [rows]."""
        compute = require_pyarrow("pyarrow.compute", self._job.input_format)
        lengths = compute.binary_length(batch.column(self._job.column))
        return compute.fill_null(lengths, 0).to_numpy(zero_copy_only=False).astype(np.int64)

    def _read(self, skip: int) -> Any:
        """Yield batches: (file, number of the first row, batch) after the first `skip` rows."""
        for number, file in enumerate(self._files):
            row = 1
            with contextlib.closing(self._parquet(file, skip) if self._is_parquet else self._csv(file)) as batches:
                for item in batches:
                    rows, batch = item if isinstance(item, tuple) else (item.num_rows, item)
                    if skip >= rows:
                        skip -= rows
                    else:
                        yield number, row + skip, self._cast(file, row + skip, batch.slice(skip))
                        skip = 0
                    row += rows

    def _parquet(self, file: str, skip: int) -> Generator[Any, None, None]:
        """Batches; of a row group that is skipped whole, the number of rows and None."""
        opened = self._open_parquet(file)
        with opened, self._errors_with_name(file):
            for group in range(opened.num_row_groups):
                rows = opened.metadata.row_group(group).num_rows
                if skip >= rows:
                    skip -= rows
                    yield rows, None
                    continue
                skip = 0
                yield from opened.iter_batches(
                    batch_size=_BATCH_ROWS, row_groups=[group], columns=self.schema.names, use_threads=False
                )

    def _csv(self, file: str) -> Generator[Any, None, None]:
        reading, binary = require_pyarrow("pyarrow.csv", "CSV"), self._pa.binary()
        names = self.schema.names
        with self._open_csv(file) as stream, self._errors_with_name(file):
            if not stream.names:
                return
            reader = reading.open_csv(
                stream,
                read_options=reading.ReadOptions(use_threads=False, block_size=_CSV_BYTES),
                parse_options=reading.ParseOptions(
                    delimiter=self._delimiter,
                    newlines_in_values=True,
                    ignore_empty_lines=len(stream.names) > 1,  # a record of one column may be empty
                ),
                # A CSV file has no types: nothing is guessed from the first rows that later ones could disprove.
                convert_options=reading.ConvertOptions(
                    include_columns=names, column_types=dict.fromkeys(names, binary), check_utf8=False
                ),
            )
            with reader:
                yield from reader

    def _open_csv(self, file: str) -> _CsvFile:
        """A CSV file and its columns' names; standard input is opened once."""
        if file != STANDARD_INPUT:
            return _CsvFile(open_bytes(file), self._delimiter)
        if self._standard_input is None:
            self._standard_input = _CsvFile(open_bytes(file), self._delimiter)
        return self._standard_input

    def _open_parquet(self, file: str) -> Any:
        parquet = require_pyarrow("pyarrow.parquet", "Parquet")
        if file == STANDARD_INPUT:
            raise BulkError("Parquet cannot be read from standard input; give the file's name")
        with Path(file).open("rb"):  # Python's error names the file
            pass
        with self._errors_with_name(file):
            # Pages are read as they are needed, not a whole row group ahead.
            return parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)

    def _file_schema(self, file: str) -> Any:
        """The schema of a file's columns. Of Parquet, its rows are counted."""
        if self._is_parquet:
            with self._open_parquet(file) as opened:
                self.total = (self.total or 0) + opened.metadata.num_rows
                return opened.schema_arrow
        opened = self._open_csv(file)
        if file != STANDARD_INPUT:
            opened.close()
        return self._pa.schema([(name, self._pa.binary()) for name in opened.names])

    def _check(self, file: str) -> None:
        """See that a file has the columns, and that they are of the first file's types."""
        types, pa, job = self._pa.types, self._pa, self._job
        schema = self._file_schema(file)
        file = display_name(file)
        if not schema.names and not self._is_parquet:
            return  # an empty file has no header, and no rows
        columns = schema.names if job.kept_columns is None else job.kept_columns
        fields = []
        for name in dict.fromkeys([*columns, job.column]):
            count = schema.names.count(name)
            if count != 1:
                option = "--column" if name == job.column else "--keep"
                has = f"{count} columns" if count else "no column"
                raise BulkError(
                    f"{file} has {has} {name!r}; {option} names one of its columns: {', '.join(schema.names) or 'none'}"
                )
            type_ = schema.field(name).type
            plain = type_.value_type if types.is_dictionary(type_) else type_
            if str(plain).endswith("_view"):
                plain = pa.string() if str(plain) == "string_view" else pa.binary()
            is_text = types.is_string(plain) or types.is_large_string(plain)
            is_bytes = types.is_binary(plain) or types.is_large_binary(plain)
            if name == job.column and not (is_text or is_bytes):
                raise BulkError(f"{file}: column {name!r} is {type_}, not strings; --column names another")
            fields.append(pa.field(name, plain))
        columns = pa.schema(fields)
        if self.schema is None:
            self.schema = columns
        elif columns != self.schema:
            expected, actual = next((a, b) for a, b in zip(self.schema, columns, strict=False) if a != b)
            raise BulkError(
                f"{file}: column {actual.name!r} is {actual.type}, and {expected.name!r} is {expected.type} in "
                f"{display_name(self._files[0])}; all files of a run must have the same columns"
            )

    def _cast(self, file: str, row: int, batch: Any) -> Any:
        """The batch with the columns and types of `schema`."""
        columns = []
        for field in self.schema:
            column = batch.column(field.name)
            with self._errors_with_name(file):
                columns.append(column if column.type == field.type else column.cast(field.type))
        conformed = self._pa.RecordBatch.from_arrays(columns, schema=self.schema)
        if not self._is_parquet:
            self._check_csv(file, row, conformed)
        return conformed

    def _check_csv(self, file: str, row: int, batch: Any) -> None:
        """See that the kept columns are UTF-8. The texts are looked at where rows may be skipped."""
        for name in batch.schema.names:
            if name == self._job.column:
                continue
            try:
                batch.column(name).cast(self._pa.string())
            except self._pa.ArrowInvalid:
                for number, value in enumerate(batch.column(name).to_pylist(), row):
                    try:
                        value.decode()
                    except UnicodeDecodeError as error:
                        byte = f"byte {value[error.start]:#04x} at position {error.start + 1}"
                        raise BulkError(
                            f"{display_name(file)} row {number}: column {name!r} is not UTF-8: {byte}"
                        ) from None

    @contextlib.contextmanager
    def _errors_with_name(self, file: str) -> Iterator[None]:
        """Errors of pyarrow, with the file's name."""
        try:
            yield
        except (self._pa.ArrowException, OSError) as error:  # pyarrow raises both for damaged files
            raise BulkError(f"{display_name(file)} cannot be read: {error}") from None


Reader = LineReader | TableReader


def open_input(files: Sequence[str], job: Job) -> Reader:
    """The reader of files of the job's format. Raises OSError and BulkError as the readers do."""
    if job.input_format in ("text", "jsonl"):
        return LineReader(files, job.block_bytes)
    return TableReader(files, job)
