"""The guard of the server's own cost: CPU and wake-ups of a short request, as multiples of a plain application's.

    python -m benchmarks.server.hot_path [--checkout FOLDER] [--baseline FILE] [--write]

The encoder answers at once (StubEncoder), and there is one HTTP process. Windows of the server take turns with windows
of a plain uvicorn and Starlette application (benchmarks.rivals.echo) under the same load. The least CPU of the one is
divided by the least of the other, so that a figure means the same on a slower or busier machine. A stage fails that is
more than TOLERANCE above the baseline in each of RUNS runs. A run takes half a minute; one without such a stage is the
last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib import record
from benchmarks.lib.load_generator import LoadGenerator
from benchmarks.lib.load_plan import Plan, Request, post
from benchmarks.lib.running_server import ROOT, RunningServer, embert, running
from benchmarks.server.measurement import Round, run_round
from benchmarks.server.short_texts import STUBS

__all__ = ["BASELINE", "RUNS", "TOLERANCE", "exceeded"]

BASELINE = Path(__file__).with_suffix(".json")
TOLERANCE = 0.2
RUNS, TURNS, WINDOW_S, SETTLE_S = 3, 8, 0.5, 0.1
TEXT = "how long does a short request of about sixteen tokens keep a server busy"
ECHO = [sys.executable, "-m", "uvicorn", "benchmarks.rivals.echo:app", "--no-access-log", "--port", "{port}"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print; exit with 1 where a stage is too far above its baseline."""
    parser = argparse.ArgumentParser(prog="benchmarks.server.hot_path", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkout", type=Path, default=ROOT, help="folder of the build; default: this one")
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    parser.add_argument("--write", action="store_true", help="write the baseline instead of comparing with it")
    options = parser.parse_args(argv)
    if options.write:
        runs = [_run(options.checkout.resolve()) for _ in range(RUNS)]
        stages = {stage: round(statistics.median(run[stage] for run in runs), 2) for stage in runs[0]}
        document = {"machine": record.machine()["cpu"], "stages": stages}
        options.baseline.write_text(json.dumps(document, indent=1) + "\n")
        print(json.dumps(stages, indent=1))
        return
    baseline: dict[str, float] = json.loads(options.baseline.read_text())["stages"]
    above: set[str] = set(baseline)
    for _ in range(RUNS):
        run = _run(options.checkout.resolve())
        above &= exceeded(run, baseline)
        rows = [
            [stage, f"{run[stage]:.2f}", f"{least:.2f}", f"{run[stage] / least:.2f}"]
            for stage, least in baseline.items()
        ]
        record.print_table(["a short request, plain application = 1", "measured", "baseline", "ratio"], rows)
        if not above:
            return
    raise SystemExit(
        f"more than {TOLERANCE:.0%} above the baseline in {RUNS} of {RUNS} runs: {', '.join(sorted(above))}"
    )


def exceeded(run: dict[str, float], baseline: dict[str, float]) -> set[str]:
    """Return the stages that are more than TOLERANCE above their baseline."""
    return {stage for stage, value in baseline.items() if run[stage] > (1 + TOLERANCE) * value}


def _run(checkout: Path) -> dict[str, float]:
    """Return each stage's figure as a multiple of the plain application's, each the best of its turns."""
    file, encoder = next(stub for stub in STUBS if (checkout / stub[0]).exists())
    stub = f"{file.removesuffix('.py').replace('/', '.')}:{encoder}"
    cpu_us: dict[str, list[float]] = {}
    wakeups: dict[str, list[float]] = {}
    with (
        LoadGenerator() as load,
        embert("--workers", "1", "--encoder", stub, checkout=checkout) as server,
        running("echo", "api", ECHO, "/health", {}) as plain,
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

    def cpu(stage: str, plain: str) -> float:
        # What other processes do to a window only adds to it.
        return min(cpu_us[stage]) / min(cpu_us[plain])

    waits = {name: statistics.median(values) for name, values in wakeups.items()}
    return {
        "HTTP process, 32 connections: CPU": cpu("many api", "plain many api"),
        "engine process, 32 connections: CPU": cpu("many engine", "plain many api"),
        "HTTP process, unknown model (404), 32 connections: CPU": cpu("unknown api", "plain many api"),
        "HTTP process, one connection: CPU": cpu("one api", "plain one api"),
        "engine process, one connection: CPU": cpu("one engine", "plain one api"),
        "HTTP process, one connection: wake-ups": waits["one api"] / waits["plain one api"],
        "engine process, one connection: wake-ups": waits["one engine"] / waits["plain one api"],
    }


def _window(load: LoadGenerator, server: RunningServer, connections: int, model: str | None = None) -> Round:
    status = 404 if model else 200
    plan = Plan(server.port, (_request(model),), connections, WINDOW_S, SETTLE_S, status=status)
    return run_round(load, server, plan)


def _request(model: str | None) -> Request:
    body = {"input": [TEXT], "encoding_format": "base64"} | ({"model": model} if model else {})
    return post("/v1/embeddings", body, kind="text", texts=1, tokens=16)


if __name__ == "__main__":
    main()
