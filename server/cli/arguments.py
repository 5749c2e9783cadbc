"""Arguments that several commands share: the model and how to load it, and the files of texts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from embert.engine import Engine
from embert.server.bulk.job import Block, BulkError, InputFormat, Job
from embert.server.bulk.reader import Reader, input_format
from embert.server.bulk.rows import ParsedRows, parse
from embert.server.config import ConfigError


def encoder_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that `load_encoder` and `Engine.load` take."""
    return {name: getattr(arguments, name) for name in ("device", "dtype", "encoder", "min_agreement")}


def load_engine(arguments: argparse.Namespace) -> Engine:
    """Loads the model. Raises EngineError."""
    return Engine.load(
        arguments.model, revision=arguments.revision, progress=not arguments.quiet, **encoder_options(arguments)
    )


def read_format(arguments: argparse.Namespace, files: Sequence[str]) -> InputFormat:
    """Returns the format of the files. Raises ConfigError for options about columns if they are lines of text."""
    format_ = input_format(files, arguments.input_format) if files else "text"
    if format_ == "text":
        for option, value in (("--column", arguments.column), ("--keep", getattr(arguments, "keep", None))):
            if value not in (None, "text", ["text"]):
                raise ConfigError(f"{option} goes with JSON lines, CSV and Parquet: lines of text have no columns")
    return format_


def read_rows(source: Reader, job: Job) -> Iterator[tuple[Block, ParsedRows]]:
    """Yields all blocks of rows. Raises BulkError for the first row that has no text, with its file and number."""
    for chunk in source.chunks():
        block, rows = Block(0, chunk.rows, chunk.ranges), parse(job, chunk.payload)
        for row, reason in rows.invalid.items():
            raise BulkError(f"{block.location(row)} {reason}")
        yield block, rows
