"""`embert rerank MODEL --query QUERY`: texts in the order of their scores, without a server."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import Any

import numpy as np
from tqdm import tqdm

from embert.engine import Engine
from embert.engine.errors import EngineError
from embert.server.bulk.job import BulkError, Job
from embert.server.bulk.reader import STANDARD_INPUT, expand, open_input
from embert.server.bulk.rows import json_line
from embert.server.bulk.writer import write_errors
from embert.server.cli import encoder_options, report_failure
from embert.server.cli.input_files import checked_format, read_rows

__all__ = ["rerank"]


def rerank(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        with ExitStack() as stack:
            files = expand(arguments.file or [STANDARD_INPUT])
            job = Job(input_format=checked_format(arguments, files), column=arguments.column or "text")
            texts = [text for _, rows in read_rows(open_input(files, job), job) for text in rows.texts]
            engine = stack.enter_context(
                Engine.load(
                    arguments.model,
                    revision=arguments.revision,
                    progress=not arguments.quiet,
                    **encoder_options(arguments),
                )
            )
            with tqdm(unit=" texts", total=len(texts), disable=arguments.quiet or None, leave=False) as bar:

                def advance(texts_done: int) -> None:
                    bar.update(texts_done)

                ranked = engine.rerank(
                    arguments.query,
                    texts,
                    top_n=arguments.top_n,
                    raw=arguments.raw,
                    prompt_name=arguments.prompt_name,
                    truncate=arguments.truncate,
                    progress=advance,
                )
            with write_errors("standard output"):
                for result in ranked:
                    line: dict[str, Any] = {"index": result.index, "score": np.float32(result.score)}
                    if arguments.return_text:
                        line["text"] = texts[result.index]
                    sys.stdout.buffer.write(json_line(line))
                sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except (EngineError, OSError, BulkError) as error:
        report_failure(error)
        return 1
    return 0
