"""What a block's bytes say: the text of each row, what is wrong with a row, and the columns that are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from embert.server.bulk.input.paths import arrow
from embert.server.bulk.job import BulkError, Job

__all__ = ["Bad", "ReadRows", "json_schema", "read_rows", "schema_of"]

_MANY_DIGITS = re.compile(rb"\d{19}")  # of an integer over 64 bits; strings and fractions may have them too
_KINDS = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}


@dataclass(frozen=True, slots=True)
class Bad:
    """A row without a text, and what is wrong, to follow its place in a sentence."""

    row: int
    wrong: str


@dataclass(frozen=True, slots=True)
class ReadRows:
    """The good rows of a block, and the others."""

    texts: list[str]
    rows: Sequence[int]  # the number in the block of each text's row
    bad: list[Bad]
    content: Any = None  # objects of JSON lines, or an Arrow batch of all rows


def read_rows(job: Job, payload: memoryview) -> ReadRows:
    """Read a block's bytes."""
    if job.input_format == "text":
        return _lines(bytes(payload))
    if job.input_format == "jsonl":
        return _objects(job, bytes(payload))
    return _batch(job, payload)


def _lines(payload: bytes) -> ReadRows:
    try:
        texts = payload.decode().split("\n")[:-1]
    except UnicodeDecodeError:
        read = [_decoded(line.rstrip(b"\r")) for line in payload.split(b"\n")[:-1]]
        return _sorted_out(read)
    if "\r" in payload.decode():
        texts = [text.rstrip("\r") for text in texts]
    return ReadRows(texts, range(len(texts)), [])


def _decoded(data: bytes) -> str | Bad:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return Bad(0, f"is not UTF-8: byte {data[error.start]:#04x} at position {error.start + 1}")


def _sorted_out(read: Sequence[str | Bad | None], content: Any = None) -> ReadRows:
    """Texts and bad rows; None is a row that does not count."""
    good = [row for row, each in enumerate(read) if isinstance(each, str)]
    texts = [each for each in read if isinstance(each, str)]
    bad = [Bad(row, each.wrong) for row, each in enumerate(read) if isinstance(each, Bad)]
    return ReadRows(texts, good, bad, content)


def _objects(job: Job, payload: bytes) -> ReadRows:
    name = job.column
    content: list[Any] = []
    read: list[str | Bad | None] = []
    for line in payload.split(b"\n")[:-1]:
        try:
            row: Any = orjson.loads(line)
            text = row[name]
        except (ValueError, TypeError, LookupError):
            text = None
        good = isinstance(text, str)
        if good and _MANY_DIGITS.search(line) and (wrong := _rounded(job, line)):
            read.append(Bad(0, wrong))
            content.append(None)
            continue
        read.append(text if good else _wrong(line, name))
        content.append(row if good else None)
    return _sorted_out(read, content)


def _rounded(job: Job, line: bytes) -> str:
    """Which kept field has an integer that no 64 bits hold, which orjson reads as a float; empty: none."""
    row = json.loads(line)
    for name in row if job.kept is None else job.kept:
        if _has_large_integer(row.get(name)):
            return f"field {name!r} has an integer of more than 64 bits, which the output would round"
    return ""


def _has_large_integer(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_large_integer, value.values()))
    if isinstance(value, list):
        return any(map(_has_large_integer, value))
    return isinstance(value, int) and not -(1 << 63) <= value < 1 << 64


def _wrong(line: bytes, name: str) -> Bad | None:
    """What is wrong with a line of JSON; None for a blank one."""
    if not line.strip():
        return None
    try:
        row = orjson.loads(line)
    except ValueError as error:
        return Bad(0, f"is not JSON: {error}")
    if not isinstance(row, dict):
        return Bad(0, f"is {_KINDS.get(type(row), 'a value')}, not an object with the field {name!r}")
    if name not in row:
        has = ", ".join(row) or "no field"
        return Bad(0, f"has no field {name!r}; it has {has}; --column names another")
    if row[name] is None:
        return Bad(0, f"field {name!r} is null")
    return Bad(0, f"field {name!r} is {_KINDS[type(row[name])]}, not a string")


def _batch(job: Job, payload: memoryview) -> ReadRows:
    pyarrow = arrow("pyarrow", job.input_format)
    batch = pyarrow.ipc.open_stream(payload).read_next_batch()
    column = batch.column(job.column)
    is_bytes = pyarrow.types.is_binary(column.type) or pyarrow.types.is_large_binary(column.type)
    if not is_bytes:
        try:
            column.validate(full=True)
        except pyarrow.ArrowInvalid:  # not UTF-8: which row is it?
            large = pyarrow.types.is_large_string(column.type)
            column, is_bytes = column.view(pyarrow.large_binary() if large else pyarrow.binary()), True
    values = column.to_pylist()
    if not column.null_count and not is_bytes:
        return ReadRows(values, range(len(values)), [], batch)
    null = Bad(0, f"column {job.column!r} is null")
    decode: Callable[[Any], str | Bad] = _decoded if is_bytes else str
    return _sorted_out([null if value is None else decode(value) for value in values], batch)


# The columns of a Parquet file that is written.


def schema_of(job: Job, read: Any) -> Any:
    """The kept columns' schema, given that of the rows of a table; None for lines of text, which have no other."""
    pyarrow = arrow("pyarrow", "Parquet")
    if read is None:
        return pyarrow.schema([(job.column, pyarrow.string())] if job.kept != () else [])
    fields = []
    for name in read.names if job.kept is None else job.kept:
        type_ = read.field(name).type
        is_text = name == job.column or job.input_format in ("csv", "tsv")
        if is_text and type_ == pyarrow.binary():
            type_ = pyarrow.string()
        elif is_text and type_ == pyarrow.large_binary():
            type_ = pyarrow.large_string()
        fields.append(pyarrow.field(name, type_))
    return pyarrow.schema(fields)


def json_schema(job: Job, lines: bytes) -> Any:
    """The schema of the kept fields of JSON lines, from the first of them; strings where those have nulls alone."""
    pyarrow = arrow("pyarrow", "Parquet")
    rows = [row for row in read_rows(job, memoryview(lines)).content if row is not None]
    every = list(dict.fromkeys(name for row in rows for name in row))
    names = every if job.kept is None else job.kept
    fields = []
    for name in dict.fromkeys(names):
        if name == job.column:
            fields.append(pyarrow.field(name, pyarrow.string()))
            continue
        if rows and name not in every:
            raise BulkError(
                f"no field {name!r} in the first {len(rows)} lines; --keep names one of: {', '.join(every)}"
            )
        try:
            type_ = pyarrow.array([row.get(name) for row in rows]).type
        except pyarrow.ArrowException as error:
            raise BulkError(f"field {name!r} has values of several types, so it is no column: {error}") from None
        fields.append(pyarrow.field(name, pyarrow.string() if type_ == pyarrow.null() else type_))
    return pyarrow.schema(fields)
