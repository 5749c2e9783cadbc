"""A server under measurement: started on a free port, ready, its processes' CPU and memory read by kind, stopped."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

__all__ = ["Missing", "Serving", "embert", "infinity", "plain_fastapi"]

ROOT = Path(__file__).parents[2]
READY_WITHIN_S = 180.0
KINDS = {"embert.server.api.process": "api", "embert.server.worker.process": "engine"}


class Missing(Exception):
    """A rival that is not installed here."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that answers."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    root: str  # what kind of process the one we started is
    ready_s: float  # from the command to the first 200 of its readiness route

    def cpu_s(self) -> dict[str, float]:
        """Return user + system seconds so far by kind of process."""
        spent: dict[str, float] = {}
        for kind, process in self._processes():
            times = process.cpu_times()
            spent[kind] = spent.get(kind, 0.0) + times.user + times.system
        return spent

    def count(self) -> dict[str, int]:
        """Return the number of processes of each kind."""
        counted: dict[str, int] = {}
        for kind, _ in self._processes():
            counted[kind] = counted.get(kind, 0) + 1
        return counted

    def rss_mb(self) -> dict[str, float]:
        """Return the resident memory in MB (10⁶ bytes) of the largest process of each kind."""
        held: dict[str, float] = {}
        for kind, process in self._processes():
            held[kind] = max(held.get(kind, 0.0), process.memory_info().rss / 1e6)
        return held

    def _processes(self) -> Iterator[tuple[str, psutil.Process]]:
        root = psutil.Process(self.process.pid)
        for process in [root, *root.children(recursive=True)]:
            words = process.cmdline()
            yield next((kind for module, kind in KINDS.items() if module in words), self.root), process


@contextmanager
def embert(*options: str, model: str | None = None) -> Iterator[Serving]:
    """Start `embert serve` with `options`; without a model, the default one."""
    command = [sys.executable, "-m", "embert.server.commands.cli", "serve", *([model] if model else []), *options]
    with _serving("embert", "supervisor", [*command, "--port", "{port}"], "/readyz", {}) as serving:
        yield serving


@contextmanager
def plain_fastapi(model: Path) -> Iterator[Serving]:
    """Start the rival with the same model: around sentence-transformers, or where that is missing, transformers."""
    with_sentence_transformers = find_spec("sentence_transformers") is not None
    app = "plain_fastapi" if with_sentence_transformers else "plain_transformers"
    name = "plain FastAPI" if with_sentence_transformers else "plain FastAPI (transformers)"
    command = [sys.executable, "-m", "uvicorn", f"benchmarks.rivals.{app}:app", "--port", "{port}"]
    with _serving(name, "server", command, "/health", {"MODEL": str(model)}) as serving:
        yield serving


@contextmanager
def infinity(model: Path) -> Iterator[Serving]:
    """Start Infinity with the same model, in the type it chooses: bfloat16 on a GPU.

    Its dependencies exclude ours, so it wants an environment of its own: INFINITY=/path/to/bin/infinity_emb. Raises
    Missing where its command is not installed.
    """
    program = os.environ.get("INFINITY") or shutil.which("infinity_emb")
    if program is None:
        raise Missing(
            "Infinity is not installed (pip install 'infinity-emb[torch,server]'; INFINITY names its command)"
        )
    command = [program, "v2", "--model-id", str(model), "--served-model-name", "bench", "--port", "{port}"]
    command += ["--dtype", "auto", "--no-model-warmup"]
    environment = {"HF_HUB_OFFLINE": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0", "DO_NOT_TRACK": "1"}
    with _serving("Infinity", "server", command, "/health", environment) as serving:
        yield serving


@contextmanager
def _serving(
    name: str, root: str, command: Sequence[str], ready: str, environment: Mapping[str, str]
) -> Iterator[Serving]:
    port = _free_port()
    # The engine process imports benchmarks.lib.stub_encoders from here; packages may lie on the path that we were given.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryFile() as log:
        started = time.monotonic()
        process = subprocess.Popen(
            [word.format(port=port) for word in command],
            env={**os.environ, "PYTHONPATH": path, **environment},
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            try:
                _wait_until_ready(process, f"http://127.0.0.1:{port}{ready}", started + READY_WITHIN_S)
            except RuntimeError as error:
                log.seek(0)
                tail = log.read().decode(errors="replace")[-4000:]
                raise SystemExit(f"{name}: {error}\n{tail}") from None
            yield Serving(name, port, process, root, time.monotonic() - started)
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, deadline: float) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"ended with status {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.01)
    raise RuntimeError(f"was not ready within {READY_WITHIN_S:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(40)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
