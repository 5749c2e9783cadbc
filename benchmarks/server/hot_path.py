"""The guard of the server's own cost: calls of functions, CPU and wake-ups of a short request.

    python -m benchmarks.server.hot_path [--checkout FOLDER] [--baseline FILE] [--write]

The encoder returns at once (StubEncoder), and the server has one HTTP process. A figure that is too far above its
baseline in each of RUNS runs fails; runs without such a figure are the last.

Calls are counted (benchmarks.lib.call_counter) over requests that are sent one after the other: how often our code
calls a function of Python's or of C's for one request. The least of many windows depends neither on the machine nor on
its load, so CALLS_TOLERANCE is small. For the engine process it is their median: a window may end before the engine has
finished with the last request.

CPU is measured: windows of the server alternate with windows of a plain uvicorn and Starlette application
(benchmarks.rivals.echo) under the same load, and the least CPU of the one is divided by the least of the other. What
other processes do to caches moves that quotient, hence TOLERANCE. A run takes about 20 s.

The last stage is the median latency of one short text next to 16 connections of 32 passages, divided by that of the
large requests. A short text that waits for all large requests that are ready takes as long as they do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPResponse
from pathlib import Path

import numpy as np

from benchmarks.lib import record
from benchmarks.lib.load_generator import LoadGenerator
from benchmarks.lib.load_plan import Plan, Request, post
from benchmarks.lib.running_server import ROOT, RunningServer, embert, running
from benchmarks.server.measurement import Round, run_round
from benchmarks.server.short_texts import STUBS

BASELINE = Path(__file__).with_suffix(".json")
TOLERANCE, CALLS_TOLERANCE = 0.5, 0.02
RUNS, TURNS, WINDOW_S, SETTLE_S = 3, 3, 0.5, 0.1
CALLS_WINDOWS, CALLS_REQUESTS = 30, 10
COUNTER = ROOT / "benchmarks" / "lib" / "call_counter"
LARGE_CONNECTIONS, PASSAGES, PASSAGE_SENTENCES = 16, 32, 7
TEXT = "how long does a short request of about sixteen tokens keep a server busy"
ECHO = [sys.executable, "-m", "uvicorn", "benchmarks.rivals.echo:app", "--no-access-log", "--port", "{port}"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print; exit with 1 where a stage is too far above its baseline."""
    parser = argparse.ArgumentParser(prog="benchmarks.server.hot_path", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkout", type=Path, default=ROOT, help="folder of the build; default: this one")
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    parser.add_argument("--write", action="store_true", help="write the baseline instead of comparing with it")
    options = parser.parse_args(argv)
    checkout = options.checkout.resolve()
    if options.write:
        calls, runs = _calls(checkout), [_run(checkout) for _ in range(RUNS)]
        stages = {stage: round(statistics.median(run[stage] for run in runs), 2) for stage in runs[0]}
        document = {"machine": record.machine()["cpu"], "calls": calls, "stages": stages}
        options.baseline.write_text(json.dumps(document, indent=1) + "\n")
        print(options.baseline.read_text())
        return
    baseline: dict[str, dict[str, float]] = json.loads(options.baseline.read_text())
    _guard("calls a request", partial(_calls, checkout), baseline["calls"], CALLS_TOLERANCE)
    _guard("a short request, plain application = 1", partial(_run, checkout), baseline["stages"], TOLERANCE)


def _guard(title: str, measure: Callable[[], dict[str, float]], baseline: dict[str, float], tolerance: float) -> None:
    """Raise SystemExit where a stage is too far above its baseline in each of RUNS runs."""
    above: set[str] = set(baseline)
    for _ in range(RUNS):
        run = measure()
        above &= exceeded(run, baseline, tolerance)
        rows = [
            [stage, f"{run[stage]:.2f}", f"{value:.2f}", f"{run[stage] / value:.2f}"]
            for stage, value in baseline.items()
        ]
        record.print_table([title, "measured", "baseline", "ratio"], rows)
        if not above:
            return
    raise SystemExit(
        f"{title}: more than {tolerance:.0%} above the baseline in {RUNS} of {RUNS} runs: {', '.join(sorted(above))}"
    )


def exceeded(run: dict[str, float], baseline: dict[str, float], tolerance: float) -> set[str]:
    """Return the stages that are more than `tolerance` above their baseline."""
    return {stage for stage, value in baseline.items() if run[stage] > (1 + tolerance) * value}


def _stub(checkout: Path) -> list[str]:
    file, encoder = next(stub for stub in STUBS if (checkout / stub[0]).exists())
    return ["--workers", "1", "--encoder", f"{file.removesuffix('.py').replace('/', '.')}:{encoder}"]


def _calls(checkout: Path) -> dict[str, float]:
    """Return the calls a request that each process makes."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"CALL_COUNTER": folder, "PYTHONPATH": os.pathsep.join(map(str, (COUNTER, checkout)))}
        with embert(*_stub(checkout), checkout=checkout, environment=environment) as server:
            connection = socket.create_connection(("127.0.0.1", server.port))

            def ask(count: int, model: str | None) -> None:
                for _ in range(count):
                    _ask(connection, _request(model))

            def counted() -> dict[str, int]:
                counts = {}
                for kind, process in server.processes():
                    if kind in ("http", "engine"):
                        file = Path(folder, str(process.pid))
                        process.send_signal(signal.SIGUSR2)
                        while not file.exists():
                            time.sleep(0.001)
                        counts[kind] = int(file.read_text())
                        file.unlink()
                return counts

            windows: dict[str, list[float]] = {}
            for name, model in (("", None), (" 404", "none")):
                ask(CALLS_REQUESTS, model)  # words and heads that are cached, generators that are set up
                for _ in range(CALLS_WINDOWS):
                    before = counted()
                    ask(CALLS_REQUESTS, model)
                    for kind, count in counted().items():
                        windows.setdefault(kind + name, []).append((count - before[kind]) / CALLS_REQUESTS)
    return {
        "HTTP process": min(windows["http"]),
        "engine process": statistics.median(windows["engine"]),
        "HTTP process, unknown model (404)": min(windows["http 404"]),
    }


def _run(checkout: Path) -> dict[str, float]:
    """Return each stage's figure as a multiple of the plain application's, each the best of its windows."""
    cpu_us: dict[str, list[float]] = {}
    wakeups: dict[str, list[float]] = {}
    with (
        LoadGenerator() as load,
        embert(*_stub(checkout), checkout=checkout) as server,
        running("echo", "http", ECHO, "/health", {}) as plain,
    ):
        for _ in range(TURNS):
            for name, connections, model, each in (
                ("many", 32, None, server),
                ("plain many", 32, None, plain),
                ("unknown", 32, "none", server),
                ("one", 1, None, server),
                ("plain one", 1, None, plain),
            ):
                window = _window(load, each, connections, model)
                for kind in window.cpu_us:
                    cpu_us.setdefault(f"{name} {kind}", []).append(window.cpu_us[kind])
                    wakeups.setdefault(f"{name} {kind}", []).append(window.wakeups[kind])

        next_to_large = min(_next_to_large(load, server) for _ in range(TURNS))

    def cpu(stage: str, plain: str) -> float:
        # What other processes do to a window only adds to it.
        return min(cpu_us[stage]) / min(cpu_us[plain])

    waits = {name: statistics.median(values) for name, values in wakeups.items()}
    return {
        "HTTP process, 32 connections: CPU": cpu("many http", "plain many http"),
        "engine process, 32 connections: CPU": cpu("many engine", "plain many http"),
        "HTTP process, unknown model (404), 32 connections: CPU": cpu("unknown http", "plain many http"),
        "HTTP process, one connection: CPU": cpu("one http", "plain one http"),
        "engine process, one connection: CPU": cpu("one engine", "plain one http"),
        "HTTP process, one connection: wake-ups": waits["one http"] / waits["plain one http"],
        "engine process, one connection: wake-ups": waits["one engine"] / waits["plain one http"],
        f"one short text next to {LARGE_CONNECTIONS} connections of {PASSAGES} passages: p50": next_to_large,
    }


def _ask(connection: socket.socket, request: Request) -> None:
    connection.sendall(request.payload)  # in one piece, so that it is read in one
    response = HTTPResponse(connection)
    response.begin()
    response.read()


def _next_to_large(load: LoadGenerator, server: RunningServer) -> float:
    """Return the median latency of short texts as a multiple of that of the large requests next to them."""
    passages = [f"{number} " + " ".join([TEXT] * PASSAGE_SENTENCES) for number in range(PASSAGES)]
    body = {"input": passages, "encoding_format": "base64"}
    large = post("/v1/embeddings", body, kind="large", texts=PASSAGES, tokens=16 * PASSAGES * PASSAGE_SENTENCES)
    plan = Plan(server.port, (large,), LARGE_CONNECTIONS, WINDOW_S, SETTLE_S)
    short_s = []
    with ThreadPoolExecutor(1) as thread, socket.create_connection(("127.0.0.1", server.port)) as connection:
        running_large = thread.submit(load.run, plan)
        while not running_large.done():
            began = time.monotonic()
            _ask(connection, _request(None))
            short_s.append((began, time.monotonic() - began))
        responses = running_large.result()
    inside = [took for began, took in short_s if 0 <= began - responses.opened < WINDOW_S]
    return statistics.median(inside) / float(np.median(responses.ended - responses.due))


def _window(load: LoadGenerator, server: RunningServer, connections: int, model: str | None = None) -> Round:
    status = 404 if model else 200
    plan = Plan(server.port, (_request(model),), connections, WINDOW_S, SETTLE_S, status=status)
    return run_round(load, server, plan)


def _body(model: str | None) -> dict[str, object]:
    return {"input": [TEXT], "encoding_format": "base64", **({"model": model} if model else {})}


def _request(model: str | None) -> Request:
    return post("/v1/embeddings", _body(model), kind="text", texts=1, tokens=16)


if __name__ == "__main__":
    main()
