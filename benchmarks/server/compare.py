"""The server against its rivals over HTTP: closed loop for capacity, open loop for latency under a given load.

    python -m benchmarks.server.compare [--quick] [--plot] [--serve-options "--workers 2"]

All servers are up for the whole run, in their own default settings, and take turns round by round, so that a machine
that changes its speed changes it for all of them. Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from benchmarks.lib import record
from benchmarks.lib.load_generator import Load
from benchmarks.lib.load_worker import Plan, Request, post
from benchmarks.lib.running_server import Serving, embert, plain_fastapi
from benchmarks.lib.texts import PASSAGE_TOKENS, QUERY_TOKENS, Text, texts
from benchmarks.server import plot
from benchmarks.server.measurement import Round, median, run_round
from embert.engine.hub import locate

PASSAGES_A_REQUEST = 32
LONGEST_WAIT_S = 10.0  # a closed loop whose requests would wait longer tells nothing that a shorter one does not
OPEN_LOOP_CONNECTIONS = 256

NOTES = """
mixed: 15 queries for every 32 passages; its latencies are those of queries / passages. Where a rate is given, a
latency runs from the moment the request was due. CPU: by kind of process. Client cores: what the load itself took.
Limit: who could not have done more; "client" where that was the load itself, whose figure then says little."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and how many of them in a row are a fair sample of all."""

    name: str
    requests: tuple[Request, ...]
    cycle: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: the medians over the rounds."""

    workload: str
    load: str
    server: str
    rate: float | None  # requests/s that were due; None for a closed loop
    connections: int
    median: Round
    rounds: int


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    options = _parser().parse_args(argv)
    model = locate(options.model, revision=None, progress=True).folder
    workloads = _workloads(model / "tokenizer.json")
    with ExitStack() as stack:
        load = stack.enter_context(Load(options.clients))
        servings = []
        if "embert" in options.servers:
            arguments = shlex.split(options.serve_options)
            servings.append(stack.enter_context(embert(*arguments, model=options.model)))
        if "plain" in options.servers:
            servings.append(stack.enter_context(plain_fastapi(model)))
        _check_that_they_agree(servings, workloads["query"].requests)
        measure = _Measure(load, servings, options.rounds, options.window)
        rows = []
        for name in options.workloads:
            rows += measure.closed(workloads[name], options.levels)
        if not options.no_open and "query" in options.workloads:
            rows += measure.open(workloads["query"], rows)
    _print(rows)
    path = record.write("server", {"model": str(options.model or "default"), "rows": [asdict(row) for row in rows]})
    print(f"\nwritten: {path}")
    if options.plot:
        print(f"written: {plot.draw(path)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.server.compare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a local folder or a hub id; default: the packaged model")
    parser.add_argument("--servers", nargs="+", default=["embert", "plain"], choices=["embert", "plain"])
    parser.add_argument("--serve-options", default="", help="options for `embert serve`, as one string")
    parser.add_argument("--workloads", nargs="+", default=["query", "passages", "mixed"])
    parser.add_argument("--levels", nargs="+", type=int, default=[1, 8, 64], help="connections of the closed loops")
    parser.add_argument("--clients", type=int, default=1, help="processes that make the load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=4.0, help="seconds that one round measures")
    parser.add_argument("--no-open", action="store_true", help="closed loops only")
    parser.add_argument("--plot", action="store_true", help="also draw a PNG beside the JSON")
    parser.add_argument("--quick", dest="rounds", action="store_const", const=1, help="one round")
    return parser


def _workloads(tokenizer: Path) -> dict[str, Workload]:
    """query: one short text. passages: 32 of them. mixed: 15 queries for every 32 passages."""
    queries = [_request("query", [text]) for text in texts(QUERY_TOKENS, 960, tokenizer)]
    drawn = texts(PASSAGE_TOKENS, 64 * PASSAGES_A_REQUEST, tokenizer, seed=1)
    batches = [drawn[i : i + PASSAGES_A_REQUEST] for i in range(0, len(drawn), PASSAGES_A_REQUEST)]
    passages = [_request("passages", batch) for batch in batches]
    groups = zip((queries[i : i + 15] for i in range(0, len(queries), 15)), passages, strict=True)
    mixed = tuple(chain.from_iterable([*some, one] for some, one in groups))
    workloads = [Workload("query", tuple(queries)), Workload("passages", tuple(passages)), Workload("mixed", mixed, 16)]
    return {workload.name: workload for workload in workloads}


def _request(kind: str, chosen: Sequence[Text]) -> Request:
    body = {"inputs": [text.text for text in chosen]}
    return post("/embed", body, kind=kind, texts=len(chosen), tokens=sum(text.tokens for text in chosen))


def _check_that_they_agree(servings: Sequence[Serving], queries: Sequence[Request]) -> None:
    """A faster answer that is another answer would be worth nothing."""
    body = queries[0].payload.split(b"\r\n\r\n", 1)[1]
    vectors = []
    for serving in servings:
        url = f"http://127.0.0.1:{serving.port}/embed"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
        vectors.append(np.array(answer["embeddings"] if isinstance(answer, dict) else answer)[0])
    for serving, vector in zip(servings, vectors, strict=True):
        if (cosine := float(vector @ vectors[0])) < 0.999:
            raise SystemExit(f"{serving.name} answers other vectors than {servings[0].name}: cosine {cosine:.6f}")


class _Measure:
    """Runs the rounds, the servers taking turns."""

    def __init__(self, load: Load, servings: Sequence[Serving], rounds: int, window_s: float) -> None:
        self.load = load
        self.servings = servings
        self.rounds = rounds
        self.window_s = window_s

    def closed(self, workload: Workload, levels: Sequence[int]) -> list[Row]:
        """Run every level that a request would not wait too long at, shortest waits first."""
        rows: list[Row] = []
        rates = {serving.name: self._probe(serving, workload) for serving in self.servings}
        for level in sorted(levels):
            # A fair server may answer all the small requests before a large one: that long, the answers are not yet the
            # mix that was sent. And a window that holds few requests says little of them.
            waits = {name: level * workload.cycle / rate for name, rate in rates.items()}
            chosen = [serving for serving in self.servings if waits[serving.name] <= LONGEST_WAIT_S]
            for name, wait_s in waits.items():
                if wait_s > LONGEST_WAIT_S:
                    print(f"left out: {workload.name}, {level} in flight, {name}: a request may wait {wait_s:.0f} s")
            plans = {
                serving.name: Plan(
                    serving.port,
                    workload.requests,
                    connections=level,
                    settle_s=max(1.0, waits[serving.name]),
                    window_s=max(self.window_s, 2 * waits[serving.name]),
                )
                for serving in chosen
            }
            for row in self._rows(workload, f"{level} in flight", chosen, plans):
                rates[row.server] = max(row.median.requests_per_s, 1e-3)
                rows.append(row)
        return rows

    def open(self, workload: Workload, closed: Sequence[Row]) -> list[Row]:
        """Run everyone at 50 and 80 % of the slowest's capacity, and those with more at 50 and 80 % of their own."""
        rows: list[Row] = []
        capacity: dict[str, float] = {}
        for row in closed:
            if row.workload == workload.name:
                capacity[row.server] = max(capacity.get(row.server, 0.0), row.median.requests_per_s)
        for owner, most in sorted(capacity.items(), key=lambda item: item[1]):
            able = [serving for serving in self.servings if capacity[serving.name] >= most]
            for share in (0.5, 0.8):
                plans = {
                    serving.name: Plan(
                        serving.port, workload.requests, OPEN_LOOP_CONNECTIONS, self.window_s, rate=share * most
                    )
                    for serving in able
                }
                rows += self._rows(workload, f"{share:.0%} of {owner}'s most", able, plans)
        return rows

    def _probe(self, serving: Serving, workload: Workload) -> float:
        """Warm the server up and return about how many requests/s one connection gets, over a fair sample of them."""
        self.load.run(Plan(serving.port, workload.requests, 2, settle_s=0.0, window_s=2.0))
        window_s = 2.0
        while True:
            plan = Plan(serving.port, workload.requests, 1, settle_s=0.0, window_s=window_s)
            answers = self.load.run(plan)
            if len(answers.status) >= workload.cycle or window_s > 30.0:
                return len(answers.status) / float(answers.answered.max() - answers.due.min())
            window_s *= 2

    def _rows(self, workload: Workload, load: str, servings: Sequence[Serving], plans: dict[str, Plan]) -> list[Row]:
        rounds: dict[str, list[Round]] = {serving.name: [] for serving in servings}
        for number in range(self.rounds):
            for serving in servings if number % 2 == 0 else reversed(servings):
                measured = run_round(self.load, serving, plans[serving.name])
                rounds[serving.name].append(measured)
                line = f"{workload.name}, {load}, {serving.name}, round {number + 1} of {self.rounds}"
                print(f"{line}: {measured.requests_per_s:,.1f} requests/s", file=sys.stderr, flush=True)
        return [
            Row(workload.name, load, name, plans[name].rate, plans[name].connections, median(measured), len(measured))
            for name, measured in rounds.items()
        ]


def _print(rows: Sequence[Row]) -> None:
    head = ["workload", "load", "server", "req/s", "texts/s", "tokens/s", "p50 ms", "p99 ms"]
    head += ["CPU µs/req", "failed", "client cores", "limit"]
    record.print_table(head, [_cells(row) for row in rows])
    print(NOTES)


def _cells(row: Row) -> list[str]:
    m = row.median
    return [
        row.workload,
        row.load if row.rate is None else f"{row.rate:,.1f}/s = {row.load}",
        row.server,
        f"{m.requests_per_s:,.1f}",
        f"{m.texts_per_s:,.0f}",
        f"{m.tokens_per_s:,.0f}",
        " / ".join(f"{ms:,.1f}" for ms in m.p50_ms.values()),
        " / ".join(f"{ms:,.1f}" for ms in m.p99_ms.values()),
        ", ".join(f"{kind} {us:,.0f}" for kind, us in m.cpu_us.items()),
        str(m.failed),
        f"{m.client_cores:.2f}",
        m.limit,
    ]


if __name__ == "__main__":
    main()
