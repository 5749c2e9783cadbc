"""What the server promises when too much is asked of it, when its engine is killed, and when it runs for long.

    python -m benchmarks.soak overload [--seconds 60] [--texts 1] [--paced]
    python -m benchmarks.soak kills [--seconds 60]
    python -m benchmarks.soak mixed [--seconds 900]
    python -m benchmarks.soak idle [--connections 10000]

Each starts a server of its own, prints what it measured beside what was promised, writes it to results/, and ends with
status 1 when a promise was not kept.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict

from benchmarks.lib import record
from benchmarks.soak.mixed import kills, mixed
from benchmarks.soak.overload import idle, overload
from benchmarks.soak.slo import Line

_Part = Callable[[argparse.Namespace, float, list[str]], list[Line]]
PARTS: dict[str, tuple[_Part, float]] = {
    "overload": (overload, 60.0),
    "kills": (kills, 60.0),
    "mixed": (mixed, 900.0),
    "idle": (idle, 5.0),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of them."""
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--seconds", type=float, help="how long; default: what the promise says")
    parser.add_argument("--texts", type=int, default=32, help="of a request of overload")
    parser.add_argument("--paced", action="store_true", help="overload an encoder that takes time and no CPU, as a GPU")
    parser.add_argument("--connections", type=int, default=10_000, help="of idle")
    parser.add_argument("--clients", type=int, default=1, help="processes that make the load of overload")
    parser.add_argument("--serve-options", default="", help="options for `embert serve`, as one string")
    options = parser.parse_args(argv)
    run, seconds = PARTS[options.part]
    serve_options = shlex.split(options.serve_options)
    if options.paced:
        serve_options += ["--encoder", "benchmarks.lib.stub_encoders:PacedEncoder", "--max-batch-tokens", "2048"]
    lines = run(options, options.seconds or seconds, serve_options)
    rows = [[line.what, line.measured, line.promised, "ok" if line.kept else "MISSED"] for line in lines]
    record.print_table(["what", "measured", "promised", "verdict"], rows)
    part = options.part + ("-queries" if options.texts == 1 else "") + ("-paced" if options.paced else "")
    path = record.write(f"soak-{part}", [asdict(line) for line in lines])
    print(f"\nwritten: {path}")
    raise SystemExit(not all(line.kept for line in lines))


if __name__ == "__main__":
    main()
