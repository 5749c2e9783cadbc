"""Rival servers, each started with the model that embert serves."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from benchmarks.lib.running_server import RunningServer, running

__all__ = ["Missing", "infinity", "plain_fastapi"]


class Missing(Exception):
    """A rival that is not installed here."""


@contextmanager
def plain_fastapi(model: Path) -> Iterator[RunningServer]:
    """Start the plain FastAPI service around sentence-transformers, or around transformers where that is missing."""
    with_sentence_transformers = find_spec("sentence_transformers") is not None
    app = "plain_fastapi" if with_sentence_transformers else "plain_transformers"
    name = "plain FastAPI" if with_sentence_transformers else "plain FastAPI (transformers)"
    command = [sys.executable, "-m", "uvicorn", f"benchmarks.rivals.{app}:app", "--port", "{port}"]
    with running(name, "server", command, "/health", {"MODEL": str(model)}) as server:
        yield server


@contextmanager
def infinity(model: Path) -> Iterator[RunningServer]:
    """Start Infinity in the type that it chooses: bfloat16 on a GPU.

    Its dependencies conflict with ours, so it needs an environment of its own: INFINITY=/path/to/bin/infinity_emb.
    Raises Missing where its command is not installed.
    """
    program = os.environ.get("INFINITY") or shutil.which("infinity_emb")
    if program is None:
        raise Missing(
            "Infinity is not installed (pip install 'infinity-emb[torch,server]'; INFINITY names its command)"
        )
    command = [program, "v2", "--model-id", str(model), "--served-model-name", "bench", "--port", "{port}"]
    command += ["--dtype", "auto", "--no-model-warmup"]
    environment = {"HF_HUB_OFFLINE": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0", "DO_NOT_TRACK": "1"}
    with running("Infinity", "server", command, "/health", environment) as server:
        yield server
