"""Rival servers, each started with the model that embert serves.

Each needs its own environment: an environment variable names its command.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from benchmarks.lib.running_server import RunningServer, running

API_SERVERS = 8  # vLLM's HTTP processes
BATCH_TOKENS = 65536


class Missing(Exception):
    """A rival that is not installed here."""


@contextmanager
def plain_fastapi(model: Path) -> Iterator[RunningServer]:
    """Start the plain FastAPI service around sentence-transformers, or around transformers where that is missing."""
    name = "plain FastAPI" if find_spec("sentence_transformers") else "plain FastAPI (transformers)"
    command = [sys.executable, "-m", "uvicorn", "benchmarks.rivals.plain_fastapi:app", "--port", "{port}"]
    with running(name, "server", command, "/health", {"MODEL": str(model)}) as server:
        yield server


@contextmanager
def infinity(model: Path) -> Iterator[RunningServer]:
    """Start Infinity in the type that it chooses: bfloat16 on a GPU.

    Its dependencies conflict with ours, so it needs its own environment: INFINITY=/path/to/bin/infinity_emb.
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


@contextmanager
def vllm(model: Path) -> Iterator[RunningServer]:
    """Start vLLM's pooling runner in float16: VLLM=/path/to/bin/vllm.

    Several API servers, large batches and CUDA graphs up to 2 048 tokens were its best settings with 0.26.0 on an H100;
    VLLM_SERVE_OPTIONS replaces them. Raises Missing where its command is not named.
    """
    program = _named("VLLM", "vLLM", "pip install vllm")
    command = [program, "serve", str(model), "--served-model-name", "bench", "--port", "{port}"]
    command += ["--runner", "pooling", "--dtype", "float16"]
    best = f"--api-server-count {API_SERVERS} --max-num-batched-tokens {BATCH_TOKENS} --max-cudagraph-capture-size 2048"
    command += shlex.split(os.environ.get("VLLM_SERVE_OPTIONS", best))
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    with running("vLLM", "server", command, "/health", environment) as server:
        yield server


@contextmanager
def tei(model: Path) -> Iterator[RunningServer]:
    """Start text-embeddings-inference in float16, without a log of requests: TEI=/path/to/text-embeddings-router.

    TEI_OPTIONS replaces its settings: tokenization workers for all but two cores, and large batches, were its best
    ones with 1.9.3 on an H100. Raises Missing where its command is not named.
    """
    program = _named("TEI", "text-embeddings-inference", "cargo install --path router")
    workers = max(1, len(os.sched_getaffinity(0)) - 2)
    command = [program, "--model-id", str(model), "--dtype", "float16", "--port", "{port}"]
    best = f"--tokenization-workers {workers} --max-batch-tokens {BATCH_TOKENS} --max-concurrent-requests 4096"
    command += shlex.split(os.environ.get("TEI_OPTIONS", f"{best} --max-client-batch-size 64"))
    with running("TEI", "server", command, "/health", {"HF_HUB_OFFLINE": "1", "LOG_LEVEL": "warn"}) as server:
        yield server


def _named(variable: str, name: str, remedy: str) -> str:
    program = os.environ.get(variable)
    if program is None:
        raise Missing(f"{name} is not installed ({remedy}; {variable} names its command)")
    return program


SERVERS = {"vllm": vllm, "tei": tei, "infinity": infinity}
