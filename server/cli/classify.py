"""`embert classify` and `embert entities`: labels or entities of many texts without a server, as JSON lines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from tqdm import tqdm

from embert.engine import Engine
from embert.engine.errors import EngineError, InputError
from embert.engine.heads.zero_shot import TEMPLATE
from embert.engine.tasks import Task
from embert.server.bulk.job import Block, BulkError, Job
from embert.server.bulk.line_reader import LineReader, expand, input_format
from embert.server.bulk.rows import ParsedRows, json_line, kept_values, parse
from embert.server.bulk.table_reader import TableReader
from embert.server.cli import report_failure
from embert.server.config import ConfigError

__all__ = ["classify", "entities"]

Labeled = Callable[[list[str]], Sequence[Any]]  # texts → what each has, for JSON


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

    def labeled(engine: Engine) -> Labeled:
        def of_texts(texts: list[str]) -> Sequence[Any]:
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
            return [[{"label": each.label, "score": np.float32(each.score)} for each in answer] for answer in answers]

        return of_texts

    return _run(arguments, Task.CLASSIFY, labeled)


def entities(arguments: argparse.Namespace) -> int:
    """Run `embert entities`; returns the exit status."""

    def labeled(engine: Engine) -> Labeled:
        def of_texts(texts: list[str]) -> Sequence[Any]:
            answers = engine.entities(
                texts,
                aggregation_strategy=arguments.aggregation_strategy,
                ignore_labels=("O",) if arguments.ignore_label is None else arguments.ignore_label,
                stride=arguments.stride,
                truncate=arguments.truncate,
            )
            return [
                [
                    {
                        "label": each.label,
                        "score": np.float32(each.score),
                        "word": each.word,
                        "start": each.start,
                        "end": each.end,
                    }
                    for each in answer
                ]
                for answer in answers
            ]

        return of_texts

    return _run(arguments, Task.TOKEN_CLASSES, labeled)


def _run(arguments: argparse.Namespace, task: Task, labeled: Callable[[Engine], Labeled]) -> int:
    try:
        with ExitStack() as stack:
            # Files first, so that their errors are reported before a model is loaded.
            files = expand(arguments.file)
            job = Job(
                task=task,
                input_format=input_format(files, arguments.input_format),
                column=arguments.column or "text",
                keep=None if arguments.keep_all else (),
            )
            source: LineReader | TableReader
            if job.input_format in ("text", "jsonl"):
                source = stack.enter_context(LineReader(files, job.block_bytes))
            else:
                source = stack.enter_context(TableReader(files, job))
            engine = stack.enter_context(
                Engine.load(
                    arguments.model,
                    device=arguments.device,
                    dtype=arguments.dtype,
                    revision=arguments.revision,
                    encoder=arguments.encoder,
                    min_agreement=arguments.min_agreement,
                    progress=not arguments.quiet,
                )
            )
            of_texts = labeled(engine)
            of_texts([])  # options that the model does not take are reported before any text is read
            bar = stack.enter_context(tqdm(unit=" texts", disable=arguments.quiet or None, leave=False))
            while (chunk := source.read(job.block_texts)) is not None:
                block = Block(0, chunk.rows, chunk.ranges)
                parsed = parse(job, memoryview(chunk.payload))
                _write(job, parsed, _answers(block, parsed, of_texts))
                bar.update(len(parsed.texts))
    except BrokenPipeError:
        raise
    except (EngineError, OSError, BulkError) as error:
        report_failure(error)
        return 1
    return 0


def _answers(block: Block, parsed: ParsedRows, of_texts: Labeled) -> Sequence[Any]:
    """What each text has. Raises BulkError for the first row that cannot be read, with its file and number."""
    if parsed.invalid:
        raise BulkError(f"{block.location(parsed.invalid[0].row)} {parsed.invalid[0].reason}")
    try:
        return of_texts(parsed.texts)
    except InputError:
        for text, row in zip(parsed.texts, parsed.rows, strict=True):
            try:
                of_texts([text])
            except InputError as error:
                raise BulkError(f"{block.location(row)} {str(error).removeprefix('`texts`: text 0 ')}") from None
        raise


def _write(job: Job, parsed: ParsedRows, answers: Sequence[Any]) -> None:
    (name,) = job.vector_columns
    for values, answer in zip(kept_values(job, parsed), answers, strict=True):
        if name in values:
            raise BulkError(f"the column {name!r} of the input has the name of one of the output; leave out --keep-all")
        sys.stdout.buffer.write(json_line(values | {name: answer}))
    sys.stdout.buffer.flush()
