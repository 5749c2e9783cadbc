"""`embert embed`: the engine without HTTP."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import orjson
from tqdm import tqdm

from engine import Engine
from engine.errors import EngineError
from server.config import ConfigError

__all__ = ["embed"]

_BLOCK_TEXTS = 4096  # held in memory at once


def embed(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if bool(arguments.texts) == (arguments.file is not None):
        raise ConfigError("give texts, or --file with a text a line (- for standard input), and not both")
    try:
        with Engine.load(
            arguments.model,
            device=arguments.device,
            dtype=arguments.dtype,
            revision=arguments.revision,
            pooling=arguments.pooling,
            encoder=arguments.encoder,
            progress=not arguments.quiet,
        ) as engine:
            _run(engine, arguments)
    except (EngineError, OSError, UnicodeDecodeError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        sys.stderr.write(f"embert: error: {error}\n")
        return 1
    return 0


def _run(engine: Engine, arguments: argparse.Namespace) -> None:
    texts = _texts(arguments)
    with ExitStack() as stack:
        bar = stack.enter_context(tqdm(unit=" texts", disable=arguments.quiet or None, leave=False))
        output: BinaryIO = sys.stdout.buffer
        as_array = False
        if arguments.output is not None:
            output = stack.enter_context(Path(arguments.output).open("wb"))
            as_array = arguments.output.endswith(".npy")

        def advance(texts_done: int) -> None:
            bar.update(texts_done)

        blocks: list[npt.NDArray[np.float32]] = []
        while block := list(itertools.islice(texts, _BLOCK_TEXTS)):
            vectors = engine.embed(
                block,
                prompt_name=arguments.prompt_name,
                normalize=arguments.normalize,
                dimensions=arguments.dimensions,
                truncate=arguments.truncate,
                progress=advance,
            )
            if as_array:
                blocks.append(vectors)
                continue
            for text, vector in zip(block, vectors, strict=True):
                output.write(
                    orjson.dumps({"text": text, "embedding": vector}, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
                )
        if as_array:
            empty = np.zeros((0, arguments.dimensions or engine.model.width), np.float32)
            np.save(output, np.concatenate(blocks) if blocks else empty)
        output.flush()


def _texts(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.texts:
        yield from arguments.texts
        return
    with ExitStack() as stack:
        lines = sys.stdin if arguments.file == "-" else stack.enter_context(Path(arguments.file).open(encoding="utf-8"))
        for line in lines:
            yield line.rstrip("\r\n")
