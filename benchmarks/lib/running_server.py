"""A server under measurement: started on a free port, awaited until ready, its CPU and memory read, stopped."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

ROOT = Path(__file__).parents[2]
READY_WITHIN_S = 180.0
KINDS = {  # by module in the command line; the second two are those of builds before 2026-11-24
    "embert.server.frontend.process": "http",
    "embert.server.engine_worker.process": "engine",
    "server.api_process": "http",
    "server.engine_process": "engine",
}


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A running server and its processes."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    root: str  # the kind of `process` itself
    ready_s: float  # from the command to the first 200 of its readiness route

    def cpu_s(self) -> dict[str, float]:
        """Return user + system seconds so far, by kind of process."""
        spent: dict[str, float] = {}
        for kind, process in self.processes():
            times = process.cpu_times()
            spent[kind] = spent.get(kind, 0.0) + times.user + times.system
        return spent

    def wakeups(self) -> dict[str, int]:
        """Return how often threads have given up their core to wait so far, by kind of process."""
        waits: dict[str, int] = {}
        for kind, process in self.processes():
            statuses = Path(f"/proc/{process.pid}/task").glob("*/status")
            found = [
                re.search(r"^voluntary_ctxt_switches:\s*(\d+)", each.read_text(), re.MULTILINE) for each in statuses
            ]
            waits[kind] = waits.get(kind, 0) + sum(int(each[1]) for each in found if each)
        return waits

    def count(self) -> dict[str, int]:
        """Return the number of processes of each kind."""
        counted: dict[str, int] = {}
        for kind, _ in self.processes():
            counted[kind] = counted.get(kind, 0) + 1
        return counted

    def rss_mb(self) -> dict[str, float]:
        """Return the resident memory in MB (10⁶ bytes) of the largest process of each kind."""
        held: dict[str, float] = {}
        for kind, process in self.processes():
            held[kind] = max(held.get(kind, 0.0), process.memory_info().rss / 1e6)
        return held

    def processes(self) -> Iterator[tuple[str, psutil.Process]]:
        """Yield every living process of the server with its kind: http, engine, or `root` for all others."""
        root = psutil.Process(self.process.pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                words = process.cmdline()
            except psutil.NoSuchProcess:  # exited since it was listed
                continue
            yield next((kind for module, kind in KINDS.items() if module in words), self.root), process


@contextmanager
def embert(
    *options: str, model: str | None = None, checkout: Path = ROOT, environment: Mapping[str, str] | None = None
) -> Iterator[RunningServer]:
    """Start `embert serve` with `options`; without a model, the default one.

    Another `checkout` runs with the interpreter in its .venv, or with this interpreter if it lacks a .venv.
    """
    python = checkout / ".venv" / "bin" / "python"
    program = str(python) if checkout != ROOT and python.exists() else sys.executable
    module = "embert.server.cli.main" if (checkout / "embert").is_dir() else "server.cli"  # until 2026-11-23
    command = [program, "-m", module, "serve", *([model] if model else []), *options, "--port", "{port}"]
    with running("embert", "supervisor", command, "/readyz", environment or {}, checkout) as server:
        yield server


@contextmanager
def running(
    name: str, root: str, command: Sequence[str], ready: str, environment: Mapping[str, str], folder: Path = ROOT
) -> Iterator[RunningServer]:
    """Run `command` in `folder`; "{port}" stands for a free port. It is there from its first 200 on the route `ready`.

    Raises SystemExit with the end of its log if it exits or is not ready within READY_WITHIN_S. Where the caller fails
    while it runs, the end of its log goes to stderr. From the main thread, SIGTERM ends this process by SystemExit, so
    that `timeout` leaves no server behind.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    port = _free_port()
    # The engine process imports stub encoders from `folder`. The caller's path may hold installed packages.
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryFile() as log:
        started = time.monotonic()
        process = subprocess.Popen(
            [word.format(port=port) for word in command],
            env={**os.environ, "PYTHONPATH": path, **environment},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            try:
                _wait_until_ready(process, f"http://127.0.0.1:{port}{ready}", started + READY_WITHIN_S)
            except RuntimeError as error:
                raise SystemExit(f"{name}: {error}\n{_tail(log)}") from None
            try:
                yield RunningServer(name, port, process, root, time.monotonic() - started)
            except Exception:  # whatever the caller raises, which is raised again: its cause may be in the log
                print(f"{name}, the end of its log:\n{_tail(log)}", file=sys.stderr)
                raise
        finally:
            _stop(process)


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-4000:]


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
