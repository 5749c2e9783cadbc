"""The files that `--file`, `--input-format` and `--column` name, of every command that reads texts from files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from embert.server.bulk.job import Block, BulkError, InputFormat, Job
from embert.server.bulk.reader import Reader, input_format
from embert.server.bulk.rows import ParsedRows, parse
from embert.server.config import ConfigError

__all__ = ["checked_format", "read_rows"]


def checked_format(arguments: argparse.Namespace, files: Sequence[str]) -> InputFormat:
    """The format of the files. Raises ConfigError for options about columns where they are lines of text."""
    chosen = input_format(files, arguments.input_format) if files else "text"
    if chosen == "text":
        for option, value in (("--column", arguments.column), ("--keep", getattr(arguments, "keep", None))):
            if value not in (None, "text", ["text"]):
                raise ConfigError(f"{option} goes with JSON lines, CSV and Parquet: lines of text have no columns")
    return chosen


def read_rows(source: Reader, job: Job) -> Iterator[tuple[Block, ParsedRows]]:
    """Yield all blocks of rows. Raises BulkError for the first row that has no text, with its file and number."""
    for chunk in source.chunks():
        block, rows = Block(0, chunk.rows, chunk.ranges), parse(job, chunk.payload)
        for row, reason in rows.invalid.items():
            raise BulkError(f"{block.location(row)} {reason}")
        yield block, rows
