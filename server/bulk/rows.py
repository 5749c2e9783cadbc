"""Parses the bytes of a block: the text of each row, the invalid rows, and the columns that are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from embert.server.bulk.input_files import require_pyarrow
from embert.server.bulk.job import Job

__all__ = ["InvalidRow", "ParsedRows", "parse"]

_MANY_DIGITS = re.compile(rb"\d{19}")  # of an integer over 64 bits; strings and fractions may have them too
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


def parse(job: Job, payload: memoryview) -> ParsedRows:
    """Parse the bytes of a block."""
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
    if not column.null_count and not is_bytes:
        return ParsedRows(values, range(len(values)), [], batch)
    null = InvalidRow(0, f"column {job.column!r} is null")
    decode: Callable[[Any], str | InvalidRow] = _decode if is_bytes else str
    return _split([null if value is None else decode(value) for value in values], batch)
