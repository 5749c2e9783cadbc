"""`embert classify` and `embert entities`: labels or entities of many texts without a server, as JSON lines."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from embert.engine import Engine, Entity, LabelScore
from embert.engine.entities import DEFAULT_IGNORED
from embert.engine.errors import EngineError, InputError
from embert.engine.heads.zero_shot import TEMPLATE
from embert.engine.tasks import Task
from embert.server.bulk.job import Block, BulkError, Job
from embert.server.bulk.reader import expand, open_input
from embert.server.bulk.rows import ColumnError, ParsedRows, json_lines
from embert.server.bulk.writer import write_errors
from embert.server.cli import encoder_options, report_failure
from embert.server.cli.input_files import checked_format, read_rows
from embert.server.config import ConfigError

__all__ = ["classify", "entities"]

Labeler = Callable[[Engine, list[str]], Sequence[Any]]  # what each text has, for JSON


def classify(arguments: argparse.Namespace) -> int:
    """Run `embert classify`; returns the exit status. Raises ConfigError for options that do not go together."""
    if arguments.label and arguments.raw:
        raise ConfigError("--raw goes without --label: scores of your own labels are probabilities")
    for option, value in (
        ("--multi-label", arguments.multi_label),
        ("--hypothesis-template", arguments.hypothesis_template is not None),
    ):
        if value and not arguments.label:
            raise ConfigError(f"{option} goes with --label")
    template = TEMPLATE if arguments.hypothesis_template is None else arguments.hypothesis_template

    def label(engine: Engine, texts: list[str]) -> Sequence[Any]:
        if arguments.label:
            answers = engine.zero_shot(
                texts,
                arguments.label,
                hypothesis_template=template,
                multi_label=arguments.multi_label,
                truncate=arguments.truncate,
            )
        else:
            answers = engine.classify(texts, raw=arguments.raw, truncate=arguments.truncate)
        return [[_json_fields(each) for each in answer] for answer in answers]

    return _run(arguments, Task.CLASSIFY, label)


def entities(arguments: argparse.Namespace) -> int:
    """Run `embert entities`; returns the exit status."""

    def label(engine: Engine, texts: list[str]) -> Sequence[Any]:
        answers = engine.entities(
            texts,
            aggregation_strategy=arguments.aggregation_strategy,
            ignore_labels=DEFAULT_IGNORED if arguments.ignore_label is None else arguments.ignore_label,
            stride=arguments.stride,
            truncate=arguments.truncate,
        )
        return [[_json_fields(each) for each in answer] for answer in answers]

    return _run(arguments, Task.TOKEN_CLASSES, label)


def _json_fields(answer: LabelScore | Entity) -> dict[str, Any]:
    fields = dataclasses.asdict(answer) | {"score": np.float32(answer.score)}
    fields.pop("index", None)  # of an entity
    return fields


def _run(arguments: argparse.Namespace, task: Task, label: Labeler) -> int:
    try:
        with ExitStack() as stack:
            # Files first, so that their errors are reported before a model is loaded.
            files = expand(arguments.file)
            job = Job(
                task=task,
                input_format=checked_format(arguments, files),
                column=arguments.column or "text",
                keep=None if arguments.keep_all else (),
            )
            source = open_input(files, job)
            engine = stack.enter_context(
                Engine.load(
                    arguments.model,
                    revision=arguments.revision,
                    progress=not arguments.quiet,
                    **encoder_options(arguments),
                )
            )
            label(engine, [])  # options that the model does not take are reported before any text is read
            bar = stack.enter_context(tqdm(unit=" texts", disable=arguments.quiet or None, leave=False))
            for block, parsed in read_rows(source, job):
                _write(job, block, parsed, _answers(block, parsed, partial(label, engine)))
                bar.update(len(parsed.texts))
    except BrokenPipeError:
        raise
    except (EngineError, OSError, BulkError) as error:
        report_failure(error)
        return 1
    return 0


def _answers(block: Block, parsed: ParsedRows, label: Callable[[list[str]], Sequence[Any]]) -> Sequence[Any]:
    """What each text has. Raises BulkError for the first text that is refused, with its file and number."""
    try:
        return label(parsed.texts)
    except InputError:
        for text, row in zip(parsed.texts, parsed.rows, strict=True):
            try:
                label([text])
            except InputError as error:
                raise BulkError(f"{block.location(row)} {error.reason}") from None
        raise


def _write(job: Job, block: Block, parsed: ParsedRows, answers: Sequence[Any]) -> None:
    (name,) = job.vector_columns
    with write_errors("standard output"):
        try:
            sys.stdout.buffer.writelines(json_lines(job, parsed, ({name: answer} for answer in answers)))
        except ColumnError as error:
            raise BulkError(f"{block.location(error.row)}: {error}") from None
        sys.stdout.buffer.flush()
