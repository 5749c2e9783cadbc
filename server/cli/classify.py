"""`embert classify` and `embert entities`: labels or entities of many texts without a server, as JSON lines."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from embert.engine import Engine, Entity, LabelScore
from embert.engine.entities import DEFAULT_IGNORED
from embert.engine.errors import InputError
from embert.engine.heads.zero_shot import TEMPLATE
from embert.engine.tasks import Task
from embert.server.bulk.job import Block, BulkError, Job
from embert.server.bulk.reader import expand, open_input
from embert.server.bulk.rows import ColumnError, ParsedRows, json_lines
from embert.server.bulk.writer import write_errors
from embert.server.cli.arguments import load_engine, read_format, read_rows
from embert.server.config import ConfigError

Results = Sequence[Sequence[LabelScore | Entity]]  # of each text
Labeler = Callable[[Engine, list[str]], Results]


def classify(arguments: argparse.Namespace) -> None:
    """Runs `embert classify`. Raises ConfigError for options that do not go together."""
    if arguments.label and arguments.raw:
        raise ConfigError("--raw goes without --label: scores of your own labels are probabilities")
    for option, value in (
        ("--multi-label", arguments.multi_label),
        ("--hypothesis-template", arguments.hypothesis_template is not None),
    ):
        if value and not arguments.label:
            raise ConfigError(f"{option} goes with --label")
    template = TEMPLATE if arguments.hypothesis_template is None else arguments.hypothesis_template

    def label(engine: Engine, texts: list[str]) -> Results:
        if not arguments.label:
            return engine.classify(texts, raw=arguments.raw, truncate=arguments.truncate)
        return engine.zero_shot(
            texts,
            arguments.label,
            hypothesis_template=template,
            multi_label=arguments.multi_label,
            truncate=arguments.truncate,
        )

    _run(arguments, Task.CLASSIFY, label)


def entities(arguments: argparse.Namespace) -> None:
    def label(engine: Engine, texts: list[str]) -> Results:
        return engine.entities(
            texts,
            aggregation_strategy=arguments.aggregation_strategy,
            ignore_labels=DEFAULT_IGNORED if arguments.ignore_label is None else arguments.ignore_label,
            stride=arguments.stride,
            truncate=arguments.truncate,
        )

    _run(arguments, Task.TOKEN_CLASSES, label)


def _run(arguments: argparse.Namespace, task: Task, label: Labeler) -> None:
    # Files first, so that their errors are reported before a model is loaded.
    files = expand(arguments.file)
    job = Job(
        task=task,
        input_format=read_format(arguments, files),
        column=arguments.column or "text",
        keep=None if arguments.keep_all else (),
    )
    source = open_input(files, job)
    with load_engine(arguments) as engine:
        label(engine, [])  # options that the model does not take are reported before any text is read
        with tqdm(unit=" texts", disable=arguments.quiet or None, leave=False) as bar:
            for block, rows in read_rows(source, job):
                _write(job, block, rows, _label_rows(block, rows, engine, label))
                bar.update(len(rows.texts))


def _label_rows(block: Block, rows: ParsedRows, engine: Engine, label: Labeler) -> Results:
    """Labels the texts. Raises BulkError for the first text that is refused, with its file and number."""
    try:
        return label(engine, rows.texts)
    except InputError:
        for text, row in zip(rows.texts, rows.rows, strict=True):
            try:
                label(engine, [text])
            except InputError as error:
                raise BulkError(f"{block.location(row)} {error.reason}") from None
        raise


def _write(job: Job, block: Block, rows: ParsedRows, results: Results) -> None:
    (name,) = job.vector_columns
    with write_errors("standard output"):
        try:
            outputs = ({name: [_json_fields(item) for item in items]} for items in results)
            sys.stdout.buffer.writelines(json_lines(job, rows, outputs))
        except ColumnError as error:
            raise BulkError(f"{block.location(error.row)}: {error}") from None
        sys.stdout.buffer.flush()


def _json_fields(item: LabelScore | Entity) -> dict[str, Any]:
    fields = dataclasses.asdict(item) | {"score": np.float32(item.score)}
    fields.pop("index", None)  # of an entity
    return fields
