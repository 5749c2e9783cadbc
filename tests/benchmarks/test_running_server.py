"""A server that a benchmark has started ends with it."""

from __future__ import annotations

import subprocess
import sys

import psutil

SERVER = '["%s", "-m", "http.server", "--bind", "127.0.0.1", "{port}"]'
BENCHMARK = """
import threading
from benchmarks.lib.running_server import running

with running("test", "server", {command}, "/", {{}}) as server:
    print(server.process.pid, flush=True)
    threading.Event().wait()
"""


def test_sigterm_ends_the_server_too() -> None:
    command = [sys.executable, "-c", BENCHMARK.format(command=SERVER % sys.executable)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        server = psutil.Process(int(benchmark.stdout.readline()))
        benchmark.terminate()
        assert benchmark.wait(60) == 143
    assert not server.is_running()
