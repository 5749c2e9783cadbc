"""Rows of a block: parsed from its bytes, and formatted as JSON lines or an Arrow stream for Parquet."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import pybase64

from embert.engine import Model
from embert.engine.batch import TaskOutput
from embert.engine.options import output_width
from embert.engine.tasks import Task
from embert.server.bulk.job import MAX_ROW_BYTES, BulkError, Job, require_pyarrow
from embert.server.bulk.reader import Reader

_MANY_DIGITS = re.compile(rb"\d{19}")  # of an integer over 64 bits; strings and fractions may have them too
_JSON_TYPES = {bool: "a boolean", list: "a list", dict: "an object", type(None): "null"}  # and numbers
_TOO_LONG = f"has more than {MAX_ROW_BYTES} bytes, which is the limit"


@dataclass(slots=True)
class ParsedRows:
    """The valid rows of a block, and why the others are not."""

    texts: list[str]
    rows: Sequence[int]  # for each text, the number of its row in the block
    invalid: dict[int, str] = field(default_factory=dict)  # a reason, which follows the row's location in errors
    content: Any = None  # of the valid rows: for JSON lines a list of objects, for tables an Arrow batch

    def drop(self, reasons: dict[int, str]) -> None:
        """Move valid rows to the invalid ones."""
        self.invalid = dict(sorted((self.invalid | reasons).items()))
        kept = [index for index, row in enumerate(self.rows) if row not in reasons]
        if len(kept) == len(self.texts):
            return
        self.texts = [self.texts[index] for index in kept]
        self.rows = [self.rows[index] for index in kept]
        if isinstance(self.content, list):
            self.content = [self.content[index] for index in kept]
        elif self.content is not None:
            self.content = self.content.take(np.array(kept, np.int64))


class ColumnError(Exception):
    """A row has a value that its column cannot hold unchanged."""

    def __init__(self, row: int, reason: str) -> None:
        """`row` is the row's number in the block."""
        super().__init__(reason)
        self.row = row


def parse(job: Job, payload: bytes | memoryview) -> ParsedRows:
    """Parse the bytes of a block."""
    if job.input_format == "parquet":
        return _parse_table(job, payload)
    if len(payload) > MAX_ROW_BYTES + 1:  # then it is one line
        return ParsedRows([], [], {0: _TOO_LONG})
    return (_parse_lines if job.input_format == "text" else _parse_json_lines)(job, bytes(payload))


def _parse_lines(_: Job, payload: bytes) -> ParsedRows:
    try:
        texts = payload.decode().split("\n")[:-1]
    except UnicodeDecodeError:
        return _decoded(line.rstrip(b"\r") for line in payload.split(b"\n")[:-1])
    if b"\r" in payload:
        texts = [line.rstrip("\r") for line in texts]
    return ParsedRows(texts, range(len(texts)))


def _decoded(values: Iterable[bytes | None], null: str = "") -> ParsedRows:
    """The texts of bytes that are UTF-8."""
    parsed = ParsedRows([], rows := [])
    for row, value in enumerate(values):
        try:
            if value is None or len(value) > MAX_ROW_BYTES:
                parsed.invalid[row] = null if value is None else _TOO_LONG
                continue
            parsed.texts.append(value.decode())
            rows.append(row)
        except UnicodeDecodeError as error:
            parsed.invalid[row] = f"is not UTF-8: byte {error.object[error.start]:#04x} at position {error.start + 1}"
    return parsed


def _parse_json_lines(job: Job, payload: bytes) -> ParsedRows:
    parsed = ParsedRows([], rows := [], content=(content := []))
    for number, line in enumerate(payload.split(b"\n")[:-1]):
        try:
            row: Any = orjson.loads(line)
            text: Any = row[job.column]
        except (ValueError, TypeError, LookupError):
            text = None
        if not isinstance(text, str):
            if line.strip():
                parsed.invalid[number] = _invalid(job, line)
            continue
        if _MANY_DIGITS.search(line):  # orjson would round an integer of more than 64 bits
            row = json.loads(line)
        parsed.texts.append(text)
        rows.append(number)
        content.append(row)
    return parsed


def _invalid(job: Job, line: bytes) -> str:
    """The error for a line of JSON without a text."""
    name = job.column
    try:
        row = orjson.loads(line)
    except ValueError as error:
        return f"is not JSON: {error}" if job.input_format == "jsonl" else "is not UTF-8"
    if not isinstance(row, dict):
        return f"is {_JSON_TYPES.get(type(row), 'a value')}, not an object with the field {name!r}"
    if name not in row:
        return f"has no field {name!r}; it has {', '.join(row) or 'no field'}; --column names another"
    return f"field {name!r} is {_JSON_TYPES.get(type(row[name]), 'a number')}, not a string"


def _parse_table(job: Job, payload: bytes | memoryview) -> ParsedRows:
    pa = require_pyarrow("pyarrow", "parquet")
    batch = pa.ipc.open_stream(payload).read_next_batch()
    column = batch.column(job.column)
    if column.type in (pa.string(), pa.large_string()) and not column.null_count and len(payload) <= MAX_ROW_BYTES:
        with contextlib.suppress(UnicodeDecodeError):
            return ParsedRows(column.to_pylist(), range(batch.num_rows), content=batch)
    parsed = _decoded(column.cast(pa.large_binary()).to_pylist(), f"column {job.column!r} is null")
    parsed.content = batch.take(np.array(parsed.rows, np.int64)) if parsed.invalid else batch
    return parsed


def json_line(values: Mapping[str, Any]) -> bytes:
    """An object as a line. Bytes are written in base64; what JSON lacks, such as decimals, as text."""
    return orjson.dumps(values, default=_as_text, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _as_text(value: Any) -> str:
    return pybase64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def json_lines(job: Job, parsed: ParsedRows, outputs: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    """One line for each text. Raises ColumnError for a kept value that has a name of the output, or is too large."""
    for row, kept, output in zip(parsed.rows, _kept_values(job, parsed), outputs, strict=True):
        for name in kept.keys() & output.keys():
            raise ColumnError(row, f"has a field {name!r}, which is a name of the output; name others with --keep")
        try:
            yield json_line(kept | output)
        except TypeError as error:
            raise ColumnError(row, f"cannot be written as JSON: {error}") from None


def _kept_values(job: Job, parsed: ParsedRows) -> Iterable[dict[str, Any]]:
    names, values = job.kept_columns, parsed.content
    if values is None:
        return ({job.column: text} for text in parsed.texts)
    if isinstance(values, list):
        return values if names is None else ({name: row.get(name) for name in names} for row in values)
    table = values if names is None else values.select(list(names))
    try:
        rows: list[dict[str, Any]] = table.to_pylist()
    except UnicodeDecodeError:
        for index, name in itertools.product(range(table.num_rows), table.schema.names):
            try:
                table.column(name).slice(index, 1).to_pylist()
            except UnicodeDecodeError as error:
                raise ColumnError(parsed.rows[index], f"column {name!r} is not UTF-8: {error}") from None
        raise
    if names is None or job.column in names:  # where it may be of bytes
        for row, text in zip(rows, parsed.texts, strict=True):
            row[job.column] = text
    return rows


class Layout:
    """The format of the output: of its blocks, and of what a file has in addition to them.

    Columns of Parquet, without nulls:
    embedding        FixedSizeList<float32>[dimensions]
    indices, values  List<int32>, List<float32>: sparse vectors
    vectors          List<FixedSizeList<float32>[columns]>: multi-vectors
    """

    def __init__(self, job: Job, model: Model) -> None:
        """A job with output in Parquet must have the schema of its kept columns."""
        self._job, self._width = job, output_width(model, job.dimensions)
        self.is_parquet = job.output_format == "parquet"
        if not self.is_parquet:
            return
        self._pa = pa = require_pyarrow("pyarrow", "Parquet")
        self.kept_schema = pa.ipc.read_schema(pa.py_buffer(job.schema))
        floats = pa.field("element", pa.float32(), nullable=False)
        if job.task == Task.SPARSE:
            types = [pa.list_(pa.field("element", pa.int32(), nullable=False)), pa.list_(floats)]
        elif job.task == Task.MULTI:
            head = model.heads.multi_vector
            types = [pa.list_(pa.field("element", pa.list_(floats, head.columns if head else 0), nullable=False))]
        else:
            types = [pa.list_(floats, self._width)]
        columns = zip(job.vector_columns, types, strict=True)
        self.schema = pa.schema(
            [*self.kept_schema, *(pa.field(name, type_, nullable=False) for name, type_ in columns)]
        )

    def format(self, parsed: ParsedRows, vectors: TaskOutput) -> bytes | memoryview:
        """A block of JSON lines, or for Parquet an Arrow stream of one batch.

        Raises ColumnError for a kept value that its column would change.
        """
        if not self.is_parquet:
            return b"".join(json_lines(self._job, parsed, _json_vectors(self._job.task, vectors)))
        columns = [*self._kept_columns(parsed), *self._vector_columns(vectors)]
        sink = self._pa.BufferOutputStream()
        with self._pa.ipc.new_stream(sink, self.schema) as stream:
            stream.write_batch(self._pa.RecordBatch.from_arrays(columns, schema=self.schema))
        return memoryview(sink.getvalue())

    def header(self, rows: int) -> bytes:
        """The beginning of a file of JSON lines or an array: of the same length for any number of rows."""
        header = io.BytesIO()
        if self._job.output_format == "npy":
            shape = rows, self._width
            np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
        return header.getvalue()

    def parquet_writer(self, file: Any) -> Any:
        """A `pyarrow.parquet.ParquetWriter` into an open file."""
        names = self.kept_schema.names
        return require_pyarrow("pyarrow.parquet", "Parquet").ParquetWriter(
            file,
            self.schema,
            # Vectors do not repeat: compression, dictionaries and statistics gain nothing.
            compression=dict.fromkeys(names, "zstd") if names else "none",
            use_dictionary=[name for name in names if name != self._job.column],
            write_statistics=names,
        )

    def _kept_columns(self, parsed: ParsedRows) -> list[Any]:
        columns, job = parsed.content, self._job
        if isinstance(columns, list):
            others = [name for name in self.kept_schema.names if name != job.column]
            rows = [
                {name: row.get(name) for name in (row if job.kept_columns is None else others) if name != job.column}
                for row in columns
            ]
            try:
                columns = self._json_columns(rows) if others or any(rows) else {}
            except (self._pa.ArrowException, TypeError):
                for row, values in zip(parsed.rows, rows, strict=True):
                    self._check_values(row, values)
                raise
        return [
            self._pa.array(parsed.texts, kept.type) if kept.name == job.column else columns[kept.name].cast(kept.type)
            for kept in self.kept_schema
        ]

    def _json_columns(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The values of objects, which must have the columns' types and no other names."""
        pa, reader = self._pa, require_pyarrow("pyarrow.json", "Parquet")
        line = orjson.dumps({"rows": rows})  # much faster than a line for each
        table = reader.read_json(
            pa.BufferReader(line),
            reader.ReadOptions(use_threads=False, block_size=len(line) + 1),
            reader.ParseOptions(
                explicit_schema=pa.schema([("rows", pa.list_(pa.struct([*self.kept_schema])))]),
                unexpected_field_behavior="error",
            ),
        )
        return dict(zip(self.kept_schema.names, table["rows"].combine_chunks().flatten().flatten(), strict=True))

    def _check_values(self, row: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            try:
                self._json_columns([{name: value}])
            except (self._pa.ArrowException, TypeError) as error:
                raise ColumnError(row, f"field {name!r} does not fit the columns of the first lines: {error}") from None

    def _vector_columns(self, vectors: TaskOutput) -> list[Any]:
        """The vectors' columns, without a copy."""
        pa, types = self._pa, [self.schema.field(name).type for name in self._job.vector_columns]
        values = pa.array(np.ascontiguousarray(vectors.values, np.float32).reshape(-1))
        if self._job.task == Task.EMBED:
            return [pa.FixedSizeListArray.from_arrays(values, type=types[0])]
        columns = [values]
        if self._job.task == Task.SPARSE:
            columns.insert(0, pa.array(np.ascontiguousarray(vectors.indices, np.int32)))
        else:
            columns = [pa.FixedSizeListArray.from_arrays(values, type=types[0].value_type)]
        offsets = pa.array(np.ascontiguousarray(vectors.offsets, np.int32))
        return [
            pa.ListArray.from_arrays(offsets, column, type=type_) for type_, column in zip(types, columns, strict=True)
        ]


def _json_vectors(task: Task, vectors: TaskOutput) -> Iterator[dict[str, Any]]:
    if task == Task.SPARSE:
        return ({"indices": vector.indices, "values": vector.values} for vector in vectors.sparse_vectors())
    if task == Task.MULTI:
        ranges = itertools.pairwise(vectors.offsets.tolist())
        return ({"vectors": vectors.values[start:stop]} for start, stop in ranges)
    return ({"embedding": vector} for vector in vectors.values)


def kept_schema(job: Job, source: Reader | None) -> Any:
    """The schema of the kept columns. Fields of lines have the types of the first lines, or strings where all are null.

    Raises BulkError for a field that has several types, or is not there.
    """
    pa = require_pyarrow("pyarrow", "Parquet")
    if source is not None and source.schema is not None:
        return pa.schema([source.schema.field(name) for name in job.kept_columns or source.schema.names])
    if source is None or job.input_format == "text":
        return pa.schema([(job.column, pa.string())])
    rows = parse(job, source.peek(job.block_texts)).content
    available = list(dict.fromkeys(name for row in rows for name in row))
    fields = []
    for name in available if job.kept_columns is None else job.kept_columns:
        if rows and name not in available:
            known = ", ".join(available)
            raise BulkError(f"no field {name!r} in the first {len(rows)} lines; --keep names one of: {known}")
        try:
            type_ = pa.array([row.get(name) for row in rows]).type
        except (pa.ArrowException, OverflowError) as error:
            raise BulkError(f"field {name!r} has values of several types, so it cannot be a column: {error}") from None
        fields.append((name, pa.string() if type_ == pa.null() or name == job.column else type_))
    return pa.schema(fields)
