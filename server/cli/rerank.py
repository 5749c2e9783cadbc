"""`embert rerank MODEL --query QUERY`: texts in the order of their scores, without a server."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from tqdm import tqdm

from embert.server.bulk.job import Job
from embert.server.bulk.reader import STANDARD_INPUT, expand, open_input
from embert.server.bulk.rows import json_line
from embert.server.bulk.writer import write_errors
from embert.server.cli.arguments import load_engine, read_format, read_rows


def rerank(arguments: argparse.Namespace) -> None:
    files = expand(arguments.file or [STANDARD_INPUT])
    job = Job(input_format=read_format(arguments, files), column=arguments.column or "text")
    texts = [text for _, rows in read_rows(open_input(files, job), job) for text in rows.texts]
    with (
        load_engine(arguments) as engine,
        tqdm(unit=" texts", total=len(texts), disable=arguments.quiet or None, leave=False) as bar,
    ):

        def advance(count: int) -> None:
            bar.update(count)

        results = engine.rerank(
            arguments.query,
            texts,
            top_n=arguments.top_n,
            raw=arguments.raw,
            prompt_name=arguments.prompt_name,
            instruction=arguments.instruction,
            truncate=arguments.truncate,
            progress=advance,
        )
    with write_errors("standard output"):
        for result in results:
            line: dict[str, Any] = {"index": result.index, "score": np.float32(result.score)}
            if arguments.return_text:
                line["text"] = texts[result.index]
            sys.stdout.buffer.write(json_line(line))
        sys.stdout.buffer.flush()
