"""Rows of a block: parsed from its bytes, and formatted as JSON lines, an array, or an Arrow stream for Parquet."""

from __future__ import annotations

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

_MANY_DIGITS = re.compile(rb"\d{19}")  # of an integer over 64 bits; strings and fractions may have them too
_JSON_TYPES = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
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
    if job.input_format not in ("text", "jsonl"):
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
            row = text = None
        reason = ""
        if not isinstance(text, str):
            if not line.strip():
                continue
            reason = _invalid(line, job.column)
        elif _MANY_DIGITS.search(line):
            reason = _large_integer(job, line, row)
        if reason:
            parsed.invalid[number] = reason
            continue
        parsed.texts.append(text)
        rows.append(number)
        content.append(row)
    return parsed


def _large_integer(job: Job, line: bytes, row: Mapping[str, Any]) -> str:
    """The error for a kept field with an integer that orjson has rounded to a float of 64 bits, or ""."""
    exact = json.loads(line)
    for name in exact if job.kept_columns is None else job.kept_columns:
        if exact.get(name) != row.get(name):
            return f"field {name!r} has an integer of more than 64 bits, which the output would round"
    return ""


def _invalid(line: bytes, name: str) -> str:
    """The error for a line of JSON without a text."""
    try:
        row = orjson.loads(line)
    except ValueError as error:
        return f"is not JSON: {error}"
    if not isinstance(row, dict):
        return f"is {_JSON_TYPES.get(type(row), 'a value')}, not an object with the field {name!r}"
    if name not in row:
        return f"has no field {name!r}; it has {', '.join(row) or 'no field'}; --column names another"
    if row[name] is None:
        return f"field {name!r} is null"
    return f"field {name!r} is {_JSON_TYPES[type(row[name])]}, not a string"


def _parse_table(job: Job, payload: bytes | memoryview) -> ParsedRows:
    pa = require_pyarrow("pyarrow", job.input_format)
    batch = pa.ipc.open_stream(payload).read_next_batch()
    try:
        batch.validate(full=True)
        is_utf8 = True
    except pa.ArrowInvalid:  # a column of strings is not UTF-8: decode row by row
        is_utf8 = False
    column, rows = batch.column(job.column), batch.num_rows
    is_text = column.type in (pa.string(), pa.large_string())
    if is_text and is_utf8 and not column.null_count and len(payload) <= MAX_ROW_BYTES:
        return ParsedRows(column.to_pylist(), range(rows), content=batch)
    parsed = _decoded(column.cast(pa.large_binary()).to_pylist(), f"column {job.column!r} is null")
    if not is_utf8:
        for name, other in zip(batch.schema.names, batch.columns, strict=True):
            if name != job.column and other.type in (pa.string(), pa.large_string()):
                reasons = _decoded(other.cast(pa.large_binary()).fill_null(b"").to_pylist()).invalid
                parsed.invalid |= {row: f"column {name!r} {reason}" for row, reason in reasons.items()}
    parsed.content = batch.take(np.array(parsed.rows, np.int64)) if len(parsed.rows) < rows else batch
    parsed.drop(parsed.invalid)
    return parsed


def json_line(values: Mapping[str, Any]) -> bytes:
    """An object as a line. Bytes are written in base64; what JSON lacks, such as decimals, as text."""
    return orjson.dumps(values, default=_as_text, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _as_text(value: Any) -> str:
    return pybase64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def json_lines(job: Job, parsed: ParsedRows, outputs: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """One line for each text. Raises ColumnError where a kept value has a name of the output."""
    names, values = job.kept_columns, parsed.content
    if values is None:
        values = ({job.column: text} for text in parsed.texts)
    elif isinstance(values, list):
        values = values if names is None else ({name: row.get(name) for name in names} for row in values)
    else:
        values = (values if names is None else values.select(list(names))).to_pylist()
        if values and isinstance(values[0].get(job.column), bytes):
            values = (row | {job.column: text} for row, text in zip(values, parsed.texts, strict=True))
    for row, kept, output in zip(parsed.rows, values, outputs, strict=True):
        if not kept.keys().isdisjoint(job.vector_columns):
            name = next(name for name in job.vector_columns if name in kept)
            raise ColumnError(row, f"has a field {name!r}, which is a name of the output; name others with --keep")
        yield json_line(kept | output)


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
        columns, names = [], set(self.kept_schema.names)
        for kept in self.kept_schema:
            if kept.name == self._job.column:
                columns.append(self._pa.array(parsed.texts, kept.type))
            elif isinstance(parsed.content, list):
                columns.append(self._json_column(kept, parsed))
            else:
                columns.append(parsed.content.column(kept.name).cast(kept.type))
        if isinstance(parsed.content, list) and self._job.kept_columns is None:
            for row, values in zip(parsed.rows, parsed.content, strict=True):
                for name in values.keys() - names:
                    raise ColumnError(
                        row, f"has a field {name!r}, which the first lines have not; name the fields with --keep"
                    )
        return columns

    def _json_column(self, kept: Any, parsed: ParsedRows) -> Any:
        values = [row.get(kept.name) for row in parsed.content]

        def column_of(values: list[Any]) -> tuple[Any, str]:
            """The column, or the reason why there is none."""
            try:
                column = self._pa.array(values, kept.type)
            except (self._pa.ArrowException, OverflowError) as error:
                return None, str(error)
            # pyarrow truncates fractions, and drops fields that a struct does not have.
            return column, "" if all(map(unchanged, values, column.to_pylist())) else "it would change"

        column, error = column_of(values)
        if error:
            row, value = next(pair for pair in zip(parsed.rows, values, strict=True) if column_of([pair[1]])[1])
            raise ColumnError(
                row,
                f"field {kept.name!r} is not {kept.type}, as in the first lines, so it cannot be a column of a "
                f"Parquet file: {column_of([value])[1]}: {orjson.dumps(value).decode()[:80]}",
            )
        return column

    def _vector_columns(self, vectors: TaskOutput) -> list[Any]:
        """The vectors' columns, without a copy."""
        pa, types = self._pa, [self.schema.field(name).type for name in self._job.vector_columns]
        values = pa.array(np.ascontiguousarray(vectors.values, np.float32).reshape(-1))
        if self._job.task == Task.EMBED:
            return [pa.Array.from_buffers(types[0], len(vectors.values), [None], children=[values])]
        offsets = pa.py_buffer(np.ascontiguousarray(vectors.offsets, np.int32))
        if self._job.task == Task.SPARSE:
            children = [pa.array(np.ascontiguousarray(vectors.indices, np.int32)), values]
        else:
            children = [pa.Array.from_buffers(types[0].value_type, len(vectors.values), [None], children=[values])]
        return [
            pa.Array.from_buffers(type_, vectors.sequences, [None, offsets], children=[child])
            for type_, child in zip(types, children, strict=True)
        ]


def _json_vectors(task: Task, vectors: TaskOutput) -> Iterator[dict[str, Any]]:
    if task == Task.SPARSE:
        return ({"indices": vector.indices, "values": vector.values} for vector in vectors.sparse_vectors())
    if task == Task.MULTI:
        ranges = itertools.pairwise(vectors.offsets.tolist())
        return ({"vectors": vectors.values[start:stop]} for start, stop in ranges)
    return ({"embedding": vector} for vector in vectors.values)


def unchanged(value: Any, stored: Any) -> bool:
    """True if a column stores a value of JSON as it is; a field that an object lacks is null there."""
    if isinstance(value, dict) and isinstance(stored, dict):
        return value.keys() <= stored.keys() and all(unchanged(value.get(name), item) for name, item in stored.items())
    if isinstance(value, list) and isinstance(stored, list):
        return len(value) == len(stored) and all(map(unchanged, value, stored))
    return bool(value == stored) and isinstance(value, bool) == isinstance(stored, bool)


def input_schema(job: Job, table_schema: Any) -> Any:
    """The schema of the kept columns of a table; of lines of text (None), the texts."""
    pa = require_pyarrow("pyarrow", "Parquet")
    if table_schema is None:
        return pa.schema([(job.column, pa.string())])
    schema = pa.schema([table_schema.field(name) for name in job.kept_columns or table_schema.names])
    if (index := schema.get_field_index(job.column)) >= 0:  # decoded, it may be of bytes
        as_strings = {pa.binary(): pa.string(), pa.large_binary(): pa.large_string()}
        type_ = schema.field(index).type
        schema = schema.set(index, pa.field(job.column, as_strings.get(type_, type_)))
    return schema


def json_schema(job: Job, lines: bytes) -> Any:
    """The schema of the kept fields of JSON lines, from the first lines; a field that is always null has strings."""
    pa = require_pyarrow("pyarrow", "Parquet")
    rows = parse(job, lines).content or []
    available = list(dict.fromkeys(name for row in rows for name in row))
    fields = []
    for name in available if job.kept_columns is None else job.kept_columns:
        if rows and name not in available:
            known = ", ".join(available)
            raise BulkError(f"no field {name!r} in the first {len(rows)} lines; --keep names one of: {known}")
        try:
            type_ = pa.array([row.get(name) for row in rows]).type
        except pa.ArrowException as error:
            raise BulkError(f"field {name!r} has values of several types, so it cannot be a column: {error}") from None
        fields.append(pa.field(name, pa.string() if type_ == pa.null() or name == job.column else type_))
    return pa.schema(fields)
