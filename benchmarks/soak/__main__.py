"""The server's service-level objectives under overload, engine kills, idle connections and a long mixed run.

    python -m benchmarks.soak overload [--seconds 60] [--texts 1] [--paced]
    python -m benchmarks.soak kills [--seconds 60]
    python -m benchmarks.soak mixed [--seconds 900]
    python -m benchmarks.soak idle [--connections 10000]

Each part starts its own server, prints what it measured next to what is promised, and writes it to results/. The
exit status is 1 when a promise was not kept.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Any

import uvloop

from benchmarks.lib import record
from benchmarks.lib.running_server import RunningServer, embert
from benchmarks.soak.clients import Objective
from benchmarks.soak.idle import idle
from benchmarks.soak.kills import kills
from benchmarks.soak.mixed import mixed
from benchmarks.soak.overload import overload

_Part = Callable[[argparse.Namespace, float, list[str]], list[Objective]]


def _of_clients(part: Callable[[RunningServer, float], Coroutine[Any, Any, list[Objective]]]) -> _Part:
    """Return a part whose clients are coroutines of this process; they have a server, and no options."""

    def run(_: argparse.Namespace, seconds: float, serve_options: list[str]) -> list[Objective]:
        with embert(*serve_options) as server:
            return uvloop.run(part(server, seconds))

    return run


PARTS: dict[str, tuple[_Part, float]] = {  # and how many seconds each lasts
    "overload": (overload, 60.0),
    "kills": (_of_clients(kills), 60.0),
    "mixed": (_of_clients(mixed), 900.0),
    "idle": (idle, 5.0),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=list(PARTS))
    defaults = ", ".join(f"{part} {seconds:g}" for part, (_, seconds) in PARTS.items())
    parser.add_argument("--seconds", type=float, help=f"default: {defaults}")
    parser.add_argument("--texts", type=int, default=32, help="overload: texts of a request")
    parser.add_argument("--paced", action="store_true", help="overload: an encoder that takes time but no CPU")
    parser.add_argument("--clients", type=int, default=1, help="overload: processes of the load generator")
    parser.add_argument("--connections", type=int, default=10_000, help="idle: connections")
    parser.add_argument("--serve-options", default="", help="options for `embert serve`, as one string")
    options = parser.parse_args(argv)
    run, seconds = PARTS[options.part]
    serve_options = shlex.split(options.serve_options)
    if options.paced:
        serve_options += ["--encoder", "benchmarks.lib.stub_encoders:PacedEncoder", "--max-batch-tokens", "2048"]
    objectives = run(options, options.seconds or seconds, serve_options)
    rows = [[each.what, each.measured, each.promised, "ok" if each.kept else "MISSED"] for each in objectives]
    record.print_table(["what", "measured", "promised", "verdict"], rows)
    part = options.part + ("-queries" if options.texts == 1 else "") + ("-paced" if options.paced else "")
    path = record.write(f"soak-{part}", [asdict(each) for each in objectives])
    print(f"\nwritten: {path}")
    raise SystemExit(not all(each.kept for each in objectives))


if __name__ == "__main__":
    main()
