"""Requests a second with traces off and on, in turns, with a receiver of OTLP in a process of its own.

    python -m benchmarks.server.traces [--rounds 15] [--window 2] [--sampling 0 0.1 1]

Every server answers one short text a request, in front of an encoder that answers at once (StubEncoder). A round
starts, measures and stops each of them once, in an order that changes: two servers that are started alike differ for
as long as they run, by more than what is measured here. A ratio is the median of the rounds' own ratios to the server
without traces, with half of the rounds between the two ratios beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from benchmarks.lib import record
from benchmarks.lib.load_generator import LoadGenerator
from benchmarks.lib.load_plan import Plan, Request, post
from benchmarks.lib.running_server import RunningServer, embert
from benchmarks.lib.scrape import scrape
from benchmarks.lib.texts import QUERY_TOKENS, texts
from benchmarks.server.traces.receiver import receiver
from embert.engine import load_model

STUB = ("--encoder", "benchmarks.lib.stub_encoders:StubEncoder", "--workers", "1")
OFF = "off"
CASES = {0.0: "on, nothing sampled", 0.1: "on, 10 % sampled", 1.0: "on, all sampled"}  # by sampling
CONNECTIONS = 64
LEAST_RATIO = {"on, 10 % sampled": 0.95}


@dataclass(frozen=True, slots=True)
class Round:
    """One window of one server. CPU is in µs a request."""

    requests_per_s: float
    api_us: float
    engine_us: float
    exporter_us: float  # with the supervisor's
    client_cores: float


@dataclass(frozen=True, slots=True)
class Figure:
    """The medians of one server."""

    case: str
    requests_per_s: float
    ratio: float  # to the server without traces
    half: tuple[float, float]  # the first and third quartile of the rounds' ratios
    least_ratio: float | None
    api_us: float
    engine_us: float
    exporter_us: float
    client_cores: float
    spans: int  # that the receiver got, of all rounds and the time around them
    dropped: int


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(prog="benchmarks.server.traces", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--window", type=float, default=2.0, help="seconds that one round measures")
    parser.add_argument("--sampling", type=float, nargs="+", choices=[*CASES], default=[*CASES])
    options = parser.parse_args(argv)
    cases = [OFF, *(CASES[sampling] for sampling in options.sampling)]
    tokenizer = load_model().transformer_folder / "tokenizer.json"
    requests = tuple(
        post("/embed", {"inputs": text.text}, kind="query", texts=1, tokens=text.tokens)
        for text in texts(QUERY_TOKENS, 2048, tokenizer)
    )
    with ExitStack() as stack:
        load = stack.enter_context(LoadGenerator())
        traced: dict[str, tuple[str, ...]] = {OFF: ()}
        receivers = {}
        for sampling in options.sampling:
            case = CASES[sampling]
            receivers[case] = stack.enter_context(receiver())
            traced[case] = ("--otlp-endpoint", receivers[case].recv(), "--otlp-sampling", str(sampling))
        rounds: dict[str, list[Round]] = {case: [] for case in cases}
        dropped = dict.fromkeys(cases, 0)
        for number in range(options.rounds):
            order = cases[number % len(cases) :] + cases[: number % len(cases)]
            for case in order:
                with embert(*STUB, *traced[case]) as server:
                    rounds[case].append(_round(load, server, requests, options.window))
                    dropped[case] += _dropped(server)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        figures = [
            _figure(case, rounds[case], rounds[OFF], _received(receivers.get(case)), dropped[case]) for case in cases
        ]
    headings = [
        "traces",
        "requests/s",
        "ratio",
        "half of them",
        "target",
        "HTTP process µs",
        "engine µs",
        "exporter µs",
        "dropped spans",
    ]
    record.print_table(headings, [_cells(figure) for figure in figures])
    print(f"\nwritten: {record.write('traces', [asdict(figure) for figure in figures])}")


def _cells(figure: Figure) -> list[str]:
    least = "" if figure.least_ratio is None else f"≥ {figure.least_ratio:g}"
    return [
        figure.case,
        f"{figure.requests_per_s:,.0f}",
        f"{figure.ratio:.3f}",
        "{:.3f} to {:.3f}".format(*figure.half),
        least,
        f"{figure.api_us:.0f}",
        f"{figure.engine_us:.0f}",
        f"{figure.exporter_us:.0f}",
        f"{figure.dropped} of {figure.dropped + figure.spans}",
    ]


def _figure(case: str, rounds: list[Round], without: list[Round], spans: int, dropped: int) -> Figure:
    ratios = [mine.requests_per_s / theirs.requests_per_s for mine, theirs in zip(rounds, without, strict=True)]
    first, ratio, third = statistics.quantiles(ratios, n=4, method="inclusive")
    return Figure(
        case,
        statistics.median(each.requests_per_s for each in rounds),
        ratio,
        (first, third),
        LEAST_RATIO.get(case),
        statistics.median(each.api_us for each in rounds),
        statistics.median(each.engine_us for each in rounds),
        statistics.median(each.exporter_us for each in rounds),
        statistics.median(each.client_cores for each in rounds),
        spans,
        dropped,
    )


def _round(load: LoadGenerator, server: RunningServer, requests: tuple[Request, ...], window_s: float) -> Round:
    spent: list[dict[str, float]] = []
    plan = Plan(server.port, requests, connections=CONNECTIONS, window_s=window_s)
    answers = load.run(plan, at_window=lambda: spent.append(server.cpu_s()))
    if (failed := int((answers.status != 200).sum())) > 0:
        raise SystemExit(f"{failed} of {len(answers.status)} requests failed")
    inside = (answers.answered >= answers.opened) & (answers.answered < answers.opened + window_s)
    count = int(inside.sum())
    api, engine, rest = ((spent[1][kind] - spent[0][kind]) / count * 1e6 for kind in ("api", "engine", "supervisor"))
    return Round(count / window_s, api, engine, rest, answers.client_cores)


def _received(connection: Connection | None) -> int:
    if connection is None:
        return 0
    connection.send(None)
    return int(connection.recv())


def _dropped(server: RunningServer) -> int:
    return int(scrape(f"http://127.0.0.1:{server.port}/metrics").total("embert_spans_dropped_total"))


if __name__ == "__main__":
    main()
