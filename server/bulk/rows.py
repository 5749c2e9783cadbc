"""Rows of a block: parsed from its bytes, and formatted as JSON lines, an array, or an Arrow stream for Parquet."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pybase64

from embert.engine import Model
from embert.engine.batch import TaskOutput
from embert.engine.engine import output_width
from embert.engine.tasks import Task
from embert.server.bulk.job import MAX_ROW_BYTES, BulkError, Job, require_pyarrow

__all__ = [
    "ArrowFormat",
    "ColumnError",
    "FileLayout",
    "InvalidRow",
    "ParsedRows",
    "input_schema",
    "json_line",
    "json_lines",
    "json_schema",
    "kept_values",
    "parse",
    "unchanged",
]

_MANY_DIGITS = re.compile(rb"\d{19}")  # of an integer over 64 bits; strings and fractions may have them too
_TOO_LONG = f"has more than {MAX_ROW_BYTES} bytes, which is the limit"
_JSON_TYPES = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}


@dataclass(frozen=True, slots=True)
class InvalidRow:
    """A row without a text; the reason follows the row's location in the error message."""

    row: int
    reason: str


@dataclass(frozen=True, slots=True)
class ParsedRows:
    """The valid rows of a block, and the others."""

    texts: list[str]
    rows: Sequence[int]  # for each text, the number of its row in the block
    invalid: list[InvalidRow]
    content: Any = None  # for JSON lines, an object per row; for tables, an Arrow batch of all rows

    def without(self, dropped: Collection[int]) -> ParsedRows:
        """The same without some of the valid rows."""
        if not dropped:
            return self
        kept = [(text, row) for text, row in zip(self.texts, self.rows, strict=True) if row not in dropped]
        texts, rows = map(list, zip(*kept, strict=True)) if kept else ([], [])
        return ParsedRows(texts, rows, self.invalid, self.content)


def parse(job: Job, payload: memoryview) -> ParsedRows:
    """Parse the bytes of a block."""
    if job.input_format in ("text", "jsonl") and len(payload) > MAX_ROW_BYTES + 1:  # then it is one line
        return ParsedRows([], [], [InvalidRow(0, _TOO_LONG)])
    if job.input_format == "text":
        return _parse_lines(bytes(payload))
    if job.input_format == "jsonl":
        return _parse_json_lines(job, bytes(payload))
    return _parse_table(job, payload)


def _parse_lines(payload: bytes) -> ParsedRows:
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return _split([_decode(line.rstrip(b"\r")) for line in payload.split(b"\n")[:-1]])
    texts = text.split("\n")[:-1]
    if "\r" in text:
        texts = [line.rstrip("\r") for line in texts]
    return ParsedRows(texts, range(len(texts)), [])


def _decode(data: bytes) -> str | InvalidRow:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return InvalidRow(0, f"is not UTF-8: byte {data[error.start]:#04x} at position {error.start + 1}")


def _split(results: Sequence[str | InvalidRow | None], content: Any = None) -> ParsedRows:
    """Texts and invalid rows; None is a row that does not count."""
    rows = [row for row, result in enumerate(results) if isinstance(result, str)]
    texts = [result for result in results if isinstance(result, str)]
    invalid = [InvalidRow(row, result.reason) for row, result in enumerate(results) if isinstance(result, InvalidRow)]
    return ParsedRows(texts, rows, invalid, content)


def _parse_json_lines(job: Job, payload: bytes) -> ParsedRows:
    content: list[Any] = []
    results: list[str | InvalidRow | None] = []
    for line in payload.split(b"\n")[:-1]:
        try:
            row: Any = orjson.loads(line)
            result: Any = row[job.column]
        except (ValueError, TypeError, LookupError):
            row = result = None
        if not isinstance(result, str):
            result = _invalid(line, job.column)
        elif _MANY_DIGITS.search(line):
            result = _large_integer(job, line) or result
        results.append(result)
        content.append(row if isinstance(result, str) else None)
    return _split(results, content)


def _large_integer(job: Job, line: bytes) -> InvalidRow | None:
    """The error for a kept field with an integer that no 64 bits hold, which orjson reads as a float."""
    row = json.loads(line)
    for name in row if job.kept_columns is None else job.kept_columns:
        if _has_large_integer(row.get(name)):
            return InvalidRow(0, f"field {name!r} has an integer of more than 64 bits, which the output would round")
    return None


def _has_large_integer(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_large_integer, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and not -(1 << 63) <= value < 1 << 64


def _invalid(line: bytes, name: str) -> InvalidRow | None:
    """The error for a line of JSON without a text; None for a blank one."""
    if not line.strip():
        return None
    try:
        row = orjson.loads(line)
    except ValueError as error:
        return InvalidRow(0, f"is not JSON: {error}")
    if not isinstance(row, dict):
        return InvalidRow(0, f"is {_JSON_TYPES.get(type(row), 'a value')}, not an object with the field {name!r}")
    if name not in row:
        fields = ", ".join(row) or "no field"
        return InvalidRow(0, f"has no field {name!r}; it has {fields}; --column names another")
    if row[name] is None:
        return InvalidRow(0, f"field {name!r} is null")
    return InvalidRow(0, f"field {name!r} is {_JSON_TYPES[type(row[name])]}, not a string")


def _parse_table(job: Job, payload: memoryview) -> ParsedRows:
    pyarrow = require_pyarrow("pyarrow", job.input_format)
    batch = pyarrow.ipc.open_stream(payload).read_next_batch()
    column = batch.column(job.column)
    is_bytes = pyarrow.types.is_binary(column.type) or pyarrow.types.is_large_binary(column.type)
    if not is_bytes:
        try:
            column.validate(full=True)
        except pyarrow.ArrowInvalid:  # not UTF-8: decode row by row
            large = pyarrow.types.is_large_string(column.type)
            column, is_bytes = column.view(pyarrow.large_binary() if large else pyarrow.binary()), True
    values = column.to_pylist()
    is_long = len(payload) > MAX_ROW_BYTES
    if not column.null_count and not is_bytes and not is_long:
        return ParsedRows(values, range(len(values)), [], batch)
    null = InvalidRow(0, f"column {job.column!r} is null")
    decode: Callable[[Any], str | InvalidRow] = _decode if is_bytes else str
    results = [null if value is None else decode(value) for value in values]
    if is_long:
        sizes = require_pyarrow("pyarrow.compute", job.input_format).binary_length(column).to_pylist()
        pairs = zip(results, sizes, strict=True)
        results = [InvalidRow(0, _TOO_LONG) if (size or 0) > MAX_ROW_BYTES else result for result, size in pairs]
    return _split(results, batch)


def json_lines(job: Job, parsed: ParsedRows, vectors: TaskOutput) -> bytes:
    """One line for each text. Bytes of a column are written in base64; what JSON lacks, such as decimals, as text."""
    triples = zip(parsed.rows, kept_values(job, parsed), _vector_values(job, vectors), strict=True)
    return b"".join(json_line(joined(job, row, values, vector)) for row, values, vector in triples)


def joined(job: Job, row: int, values: dict[str, Any], output: dict[str, Any]) -> dict[str, Any]:
    """A row's kept values and its output. Raises ColumnError where a kept one has a name of the output."""
    if job.kept_columns is None and not values.keys().isdisjoint(output):
        name = next(name for name in output if name in values)
        raise ColumnError(row, f"has a field {name!r}, which is a name of the output; name others with --keep")
    return values | output


def json_line(values: Mapping[str, Any]) -> bytes:
    """An object as a line. Bytes are written in base64; what JSON lacks as text."""
    return orjson.dumps(values, default=_as_text, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def kept_values(job: Job, parsed: ParsedRows) -> Iterable[dict[str, Any]]:
    """Of each text the kept columns of its row."""
    if parsed.content is None:
        return ({job.column: text} for text in parsed.texts)
    names = job.kept_columns
    if job.input_format == "jsonl":
        rows = (parsed.content[row] for row in parsed.rows)
        return rows if names is None else ({name: row.get(name) for name in names} for row in rows)
    return _kept_table_values(job, parsed)


def _kept_table_values(job: Job, parsed: ParsedRows) -> Iterator[dict[str, Any]]:
    batch = parsed.content if job.kept_columns is None else parsed.content.select(list(job.kept_columns))
    rows = batch.to_pylist() if len(parsed.rows) == batch.num_rows else batch.take(list(parsed.rows)).to_pylist()
    for text, row in zip(parsed.texts, rows, strict=True):
        if job.input_format in ("csv", "tsv"):
            row |= {name: value.decode() for name, value in row.items() if name != job.column}
        if job.column in row:
            row[job.column] = text
        yield row


def _vector_values(job: Job, vectors: TaskOutput) -> Iterator[dict[str, Any]]:
    if job.task == Task.SPARSE:
        return ({"indices": vector.indices, "values": vector.values} for vector in vectors.sparse_vectors())
    if job.task == Task.MULTI:
        ranges = itertools.pairwise(vectors.offsets.tolist())
        return ({"vectors": vectors.values[start:stop]} for start, stop in ranges)
    return ({"embedding": vector} for vector in vectors.values)


def _as_text(value: Any) -> str:
    return pybase64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


class ColumnError(Exception):
    """A row has a value that its column cannot hold unchanged."""

    def __init__(self, row: int, reason: str) -> None:
        """`row` is the row's number in the block."""
        super().__init__(reason)
        self.row = row


class ArrowFormat:
    """Makes Arrow batches from blocks.

    embedding        FixedSizeList<float32>[dimensions]
    indices, values  List<int32>, List<float32>: sparse vectors
    vectors          List<FixedSizeList<float32>[columns]>: multi-vectors

    These columns have no nulls.
    """

    def __init__(self, job: Job, model: Model) -> None:
        """`job` must have the schema of its kept columns."""
        self._pa = pa = require_pyarrow("pyarrow", "Parquet")
        self._job = job
        self.kept_schema = pa.ipc.read_schema(pa.py_buffer(job.schema))
        floats = pa.field("element", pa.float32(), nullable=False)
        if job.task == Task.SPARSE:
            ids = pa.field("element", pa.int32(), nullable=False)
            types = [pa.list_(ids), pa.list_(floats)]
        elif job.task == Task.MULTI:
            head = model.heads.multi_vector
            types = [pa.list_(pa.field("element", pa.list_(floats, head.columns if head else 0), nullable=False))]
        else:
            types = [pa.list_(floats, output_width(model, job.dimensions))]
        columns = zip(job.vector_columns, types, strict=True)
        self.schema = pa.schema(
            [*self.kept_schema, *(pa.field(name, type_, nullable=False) for name, type_ in columns)]
        )

    def stream(self, parsed: ParsedRows, vectors: TaskOutput) -> memoryview:
        """An Arrow stream of one batch. Raises ColumnError for a kept value that its column would change."""
        columns = [*self._kept_columns(parsed), *self._vector_columns(vectors)]
        batch = self._pa.RecordBatch.from_arrays(columns, schema=self.schema)
        sink = self._pa.BufferOutputStream()
        with self._pa.ipc.new_stream(sink, self.schema) as stream:
            stream.write_batch(batch)
        return memoryview(sink.getvalue())

    def _kept_columns(self, parsed: ParsedRows) -> list[Any]:
        pa, job = self._pa, self._job
        is_table = parsed.content is not None and job.input_format != "jsonl"
        if is_table:
            others = parsed.content.select([name for name in self.kept_schema.names if name != job.column])
            if len(parsed.rows) < others.num_rows:
                others = others.take(pa.array(parsed.rows, pa.int64()))
        columns = []
        for field in self.kept_schema:
            if field.name == job.column:
                columns.append(pa.array(parsed.texts, field.type))
            elif is_table:
                columns.append(others.column(field.name).cast(field.type))
            else:
                columns.append(self._json_column(field, parsed))
        if job.input_format == "jsonl" and job.kept_columns is None:
            self._check_no_new_field(parsed)
        return columns

    def _json_column(self, field: Any, parsed: ParsedRows) -> Any:
        values = [parsed.content[row].get(field.name) for row in parsed.rows]
        try:
            column = self._pa.array(values, field.type)
            # pyarrow truncates fractions, and drops fields that a struct does not have.
            if all(map(unchanged, values, column.to_pylist())):
                return column
        except (self._pa.ArrowException, OverflowError):
            pass
        for row, value in zip(parsed.rows, values, strict=True):
            try:
                reason = "it would change"
                if unchanged(value, self._pa.array([value], field.type).to_pylist()[0]):
                    continue
            except (self._pa.ArrowException, OverflowError) as error:
                reason = f"{error}:"
            raise ColumnError(
                row,
                f"field {field.name!r} is not {field.type}, as in the first lines, so it is no column of a Parquet "
                f"file: {reason} {orjson.dumps(value).decode()[:80]}",
            )
        raise AssertionError("a column cannot hold its values, though it can hold each")

    def _check_no_new_field(self, parsed: ParsedRows) -> None:
        names = set(self.kept_schema.names)
        for row in parsed.rows:
            for name in parsed.content[row]:
                if name not in names:
                    raise ColumnError(
                        row, f"has a field {name!r}, which the first lines have not; name the fields with --keep"
                    )

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


def unchanged(value: Any, stored: Any) -> bool:
    """Whether a column stores a value of JSON as it is; a field that an object lacks is null there."""
    if isinstance(value, dict) and isinstance(stored, dict):
        return value.keys() <= stored.keys() and all(unchanged(value.get(name), item) for name, item in stored.items())
    if isinstance(value, list) and isinstance(stored, list):
        return len(value) == len(stored) and all(map(unchanged, value, stored))
    return bool(value == stored) and isinstance(value, bool) == isinstance(stored, bool)


def input_schema(job: Job, table_schema: Any) -> Any:
    """The schema of the kept columns of a table; of lines of text (None), the texts."""
    pyarrow = require_pyarrow("pyarrow", "Parquet")
    if table_schema is None:
        return pyarrow.schema([(job.column, pyarrow.string())])
    as_strings = {pyarrow.binary(): pyarrow.string(), pyarrow.large_binary(): pyarrow.large_string()}
    fields = []
    for name in table_schema.names if job.kept_columns is None else job.kept_columns:
        type_ = table_schema.field(name).type
        if name == job.column or job.input_format in ("csv", "tsv"):
            type_ = as_strings.get(type_, type_)
        fields.append(pyarrow.field(name, type_))
    return pyarrow.schema(fields)


def json_schema(job: Job, lines: bytes) -> Any:
    """The schema of the kept fields of JSON lines, from the first lines; a field that is always null has strings."""
    pyarrow = require_pyarrow("pyarrow", "Parquet")
    rows = [row for row in parse(job, memoryview(lines)).content if row is not None]
    available = list(dict.fromkeys(name for row in rows for name in row))
    names: Sequence[str] = available if job.kept_columns is None else job.kept_columns
    fields = []
    for name in dict.fromkeys(names):
        if name == job.column:
            fields.append(pyarrow.field(name, pyarrow.string()))
            continue
        if rows and name not in available:
            raise BulkError(
                f"no field {name!r} in the first {len(rows)} lines; --keep names one of: {', '.join(available)}"
            )
        try:
            type_ = pyarrow.array([row.get(name) for row in rows]).type
        except pyarrow.ArrowException as error:
            raise BulkError(f"field {name!r} has values of several types, so it is no column: {error}") from None
        fields.append(pyarrow.field(name, pyarrow.string() if type_ == pyarrow.null() else type_))
    return pyarrow.schema(fields)


class FileLayout:
    """What a complete output file has beside the bytes of the blocks."""

    def __init__(self, job: Job, model: Model) -> None:
        self._columns = output_width(model, job.dimensions) if job.output_format == "npy" else 0
        self.is_parquet = job.output_format == "parquet"
        if self.is_parquet:
            self._arrow, self._job = ArrowFormat(job, model), job

    def header(self, rows: int) -> bytes:
        """The beginning of a file of JSON lines or an array: of the same length for any number of rows."""
        header = io.BytesIO()
        if self._columns:
            shape = rows, self._columns
            np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
        return header.getvalue()

    def parquet_writer(self, file: Any) -> Any:
        """A `pyarrow.parquet.ParquetWriter` into an open file."""
        names = self._arrow.kept_schema.names
        return require_pyarrow("pyarrow.parquet", "Parquet").ParquetWriter(
            file,
            self._arrow.schema,
            # Vectors do not repeat: compression, dictionaries and statistics gain nothing.
            compression=dict.fromkeys(names, "zstd") if names else "none",
            use_dictionary=[name for name in names if name != self._job.column],
            write_statistics=names,
        )
