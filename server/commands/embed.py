"""`embert embed`: the engine without HTTP."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from embert.engine import Engine
from embert.engine.errors import EngineError
from embert.server.commands.embed_output import Embedded, FileOutput, OutputError, StreamOutput
from embert.server.commands.text_lines import TextLines
from embert.server.config import ConfigError

__all__ = ["embed"]

_BLOCK_TEXTS = 4096  # held in memory and written at once


def embed(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if bool(arguments.texts) == (arguments.file is not None):
        raise ConfigError("give texts, or --file with a text a line (- for standard input), and not both")
    if arguments.resume and (arguments.file is None or arguments.output is None):
        raise ConfigError("--resume goes with --file and --output")
    if arguments.queries and not arguments.multi:
        raise ConfigError("--queries goes with --multi")
    if arguments.sparse or arguments.multi:
        kind = "--sparse" if arguments.sparse else "--multi"
        if arguments.dimensions is not None or not arguments.normalize:
            raise ConfigError(f"{kind} goes without --dimensions and --no-normalize")
        if str(arguments.output).endswith(".npy"):
            raise ConfigError(f"{kind} writes JSON lines: an array {arguments.output} has no room for them")
    try:
        with ExitStack() as stack:
            # Files first, so that their errors are reported before a model is loaded.
            lines = TextLines(arguments.texts, arguments.file, stack)
            output = _output(arguments, stack)
            engine = stack.enter_context(
                Engine.load(
                    arguments.model,
                    device=arguments.device,
                    dtype=arguments.dtype,
                    revision=arguments.revision,
                    pooling=arguments.pooling,
                    encoder=arguments.encoder,
                    progress=not arguments.quiet,
                )
            )
            _run(engine, arguments, lines, output)
    except (EngineError, OSError, OutputError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        sys.stderr.write(f"embert: error: {error}\n")
        return 1
    return 0


def _output(arguments: argparse.Namespace, stack: ExitStack) -> FileOutput | StreamOutput:
    if arguments.output is None:
        return StreamOutput(sys.stdout.buffer)
    path = Path(arguments.output)
    if path.is_fifo() or path.is_char_device():
        return StreamOutput(stack.enter_context(path.open("wb")))
    return stack.enter_context(FileOutput(arguments.output))


def _run(engine: Engine, arguments: argparse.Namespace, lines: TextLines, output: FileOutput | StreamOutput) -> None:
    if isinstance(output, FileOutput):
        output.begin(_facts(engine, arguments), arguments.dimensions or engine.model.width, resume=arguments.resume)
        lines.skip(output.texts, output.digest)
    done = output.texts if isinstance(output, FileOutput) else 0
    with tqdm(unit=" texts", initial=done, disable=arguments.quiet or None, leave=False) as bar:

        def advance(texts_done: int) -> None:
            bar.update(texts_done)

        try:
            while block := list(itertools.islice(lines, _BLOCK_TEXTS)):
                vectors = _embed(engine, arguments, block, advance)
                if isinstance(output, FileOutput):
                    output.write(block, vectors, lines.digest)
                else:
                    output.write(block, vectors)
            output.finish()
        except BaseException:
            if isinstance(output, FileOutput) and output.texts and arguments.file is not None:
                bar.write(f"embert: {output.texts} texts are complete; --resume goes on after them", sys.stderr)
            raise


def _embed(
    engine: Engine, arguments: argparse.Namespace, texts: list[str], progress: Callable[[int], None]
) -> Embedded:
    task, prompt_name, truncate = arguments.task, arguments.prompt_name, arguments.truncate
    if arguments.sparse:
        return engine.embed_sparse(texts, task=task, prompt_name=prompt_name, truncate=truncate, progress=progress)
    if arguments.multi:
        is_query = arguments.queries
        return engine.embed_multi(
            texts, is_query=is_query, task=task, prompt_name=prompt_name, truncate=truncate, progress=progress
        )
    return engine.embed(
        texts,
        task=task,
        prompt_name=prompt_name,
        normalize=arguments.normalize,
        dimensions=arguments.dimensions,
        truncate=truncate,
        progress=progress,
    )


def _facts(engine: Engine, arguments: argparse.Namespace) -> dict[str, Any]:
    """What vectors depend on, except the texts."""
    model, encoder = engine.model, engine.encoder
    files = sorted(path for path in model.folder.iterdir() if path.suffix in (".json", ".safetensors"))
    return {
        "model": model.model_id,
        "model's files": {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files},
        "pooling": model.pooling,
        "encoder": encoder.name,
        "device": encoder.device,
        "dtype": encoder.dtype,
        "--sparse": arguments.sparse,
        "--multi": arguments.multi,
        "--queries": arguments.queries,
        "--task": arguments.task,
        "--prompt-name": arguments.prompt_name,
        "--dimensions": arguments.dimensions,
        "--no-normalize": not arguments.normalize,
        "--no-truncate": not arguments.truncate,
    }
