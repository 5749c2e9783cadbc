"""The server next to its rivals over HTTP: closed loops for capacity, open loops for latency at a given rate.

    python -m benchmarks.server.compare [--quick] [--plot] [--serve-options "--workers 2"]

All servers run for the whole benchmark, with their default settings, and take turns round by round, so that a change in
the machine's speed affects them alike. Figures are medians over the rounds.
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
from typing import Any

import numpy as np

from benchmarks.lib import record
from benchmarks.lib.load_generator import LoadGenerator
from benchmarks.lib.load_plan import Plan, Request, post
from benchmarks.lib.running_server import RunningServer, embert
from benchmarks.lib.texts import PASSAGE_TOKENS, QUERY_TOKENS, Text, texts
from benchmarks.rivals.servers import plain_fastapi
from benchmarks.server.measurement import Round, median, run_round
from embert.engine.files.hub import locate

WIDTH = 0.42  # of a bar; groups are 1 apart


def draw(results: Path) -> Path:
    """Write the chart as a PNG next to the results and return its path."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    document = json.loads(results.read_text())
    rows: list[dict[str, Any]] = document["figures"]["rows"]
    servers = list(dict.fromkeys(row["server"] for row in rows))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, 4), layout="constrained", gridspec_kw={"width_ratios": (7, 4)}
    )
    for axes, chosen, field, title in (
        (left, [r for r in rows if r["rate"] is None], "texts_per_s", "closed loops: texts a second"),
        (right, [r for r in rows if r["rate"] is not None], "p99_ms", "open loops: p99 in ms, from the moment due"),
    ):
        places = list(dict.fromkeys(_place(row) for row in chosen))
        for number, server in enumerate(servers):
            figures = {places.index(_place(r)): _first(r["median"][field]) for r in chosen if r["server"] == server}
            offset = (number - (len(servers) - 1) / 2) * WIDTH
            bars = axes.bar([at + offset for at in figures], list(figures.values()), WIDTH * 0.95, label=server)
            axes.bar_label(bars, fmt="{:,.0f}", fontsize=9, padding=2)
            for at in set(range(len(places))) - set(figures):  # a rate above its capacity is not measured
                axes.text(
                    at + offset,
                    0,
                    " over its capacity",
                    rotation=90,
                    ha="center",
                    va="bottom",
                    fontsize=9,
                    color="gray",
                )
        axes.set_xticks(range(len(places)), places, fontsize=9)
        axes.set_xlim(-0.6, len(places) - 0.4)
        axes.tick_params(bottom=False)
        axes.set_yticks([])  # bars start at 0 and carry their figures
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.set_title(title, loc="left", fontsize=11)
    left.legend(frameon=False)
    machine = document["machine"]
    figure.suptitle(
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, {document['date'][:10]}", fontsize=9
    )
    path = results.with_suffix(".png")
    figure.savefig(path, dpi=150)
    return path


def _first(figure: float | dict[str, float]) -> float:
    """Return the figure; of several kinds of request, that of the first: the queries."""
    return next(iter(figure.values())) if isinstance(figure, dict) else figure


def _place(row: dict[str, Any]) -> str:
    if row["rate"] is None:
        return f"{row['workload']}\n{row['connections']} in flight"
    return f"{row['workload']}\n{row['rate']:,.0f} requests/s"


PASSAGES_A_REQUEST = 32
LONGEST_WAIT_S = 10.0  # a closed loop in which requests wait longer tells nothing new
OPEN_LOOP_CONNECTIONS = 256

NOTES = """
mixed: 15 queries for every 32 passages; its latencies are of queries / passages. With a rate, a latency counts from the
moment the request was due. CPU: by kind of process. Client cores: CPU of the load generator. Limit: what was saturated;
where it says "client", the load generator was, and the row says little of the server."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests; any `cycle` of them in a row are a fair sample of all."""

    name: str
    requests: tuple[Request, ...]
    cycle: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: medians over the rounds."""

    workload: str
    load: str
    server: str
    rate: float | None  # requests/s that were due; None for a closed loop
    connections: int
    median: Round
    rounds: int


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    model = locate(options.model, revision=None, progress=True).folder
    workloads = _workloads(model / "tokenizer.json")
    with ExitStack() as stack:
        load = stack.enter_context(LoadGenerator(options.clients))
        servers = []
        if "embert" in options.servers:
            arguments = shlex.split(options.serve_options)
            servers.append(stack.enter_context(embert(*arguments, model=options.model)))
        if "plain" in options.servers:
            servers.append(stack.enter_context(plain_fastapi(model)))
        _check_vectors_agree(servers, workloads["query"].requests)
        measure = _Measure(load, servers, options.rounds, options.window)
        rows = []
        for name in options.workloads:
            rows += measure.closed(workloads[name], options.levels)
        if not options.no_open and "query" in options.workloads:
            rows += measure.open(workloads["query"], rows)
    _print(rows)
    path = record.write("server", {"model": str(options.model or "default"), "rows": [asdict(row) for row in rows]})
    print(f"\nwritten: {path}")
    if options.plot:
        print(f"written: {draw(path)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.server.compare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a local folder or a hub id; default: the packaged model")
    parser.add_argument("--servers", nargs="+", default=["embert", "plain"], choices=["embert", "plain"])
    parser.add_argument("--serve-options", default="", help="options for `embert serve`, as one string")
    parser.add_argument("--workloads", nargs="+", default=["query", "passages", "mixed"])
    parser.add_argument("--levels", nargs="+", type=int, default=[1, 8, 64], help="connections of the closed loops")
    parser.add_argument("--clients", type=int, default=1, help="processes of the load generator")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=4.0, help="seconds that a round measures")
    parser.add_argument("--no-open", action="store_true", help="closed loops only")
    parser.add_argument("--plot", action="store_true", help="also draw a PNG next to the JSON")
    parser.add_argument("--quick", dest="rounds", action="store_const", const=1, help="one round")
    return parser


def _workloads(tokenizer: Path) -> dict[str, Workload]:
    """Return query (one short text), passages (32 passages) and mixed (15 queries for every 32 passages)."""
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


def _check_vectors_agree(servers: Sequence[RunningServer], queries: Sequence[Request]) -> None:
    """Compare a vector of each server; end the program if they differ."""
    body = queries[0].payload.split(b"\r\n\r\n", 1)[1]
    vectors = []
    for server in servers:
        url = f"http://127.0.0.1:{server.port}/embed"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            response = json.load(response)
        vectors.append(np.array(response["embeddings"] if isinstance(response, dict) else response)[0])
    for server, vector in zip(servers, vectors, strict=True):
        if (cosine := float(vector @ vectors[0])) < 0.999:
            raise SystemExit(f"{server.name} returns other vectors than {servers[0].name}: cosine {cosine:.6f}")


class _Measure:
    """Runs the rounds, in which the servers take turns."""

    def __init__(self, load: LoadGenerator, servers: Sequence[RunningServer], rounds: int, window_s: float) -> None:
        self.load = load
        self.servers = servers
        self.rounds = rounds
        self.window_s = window_s

    def closed(self, workload: Workload, levels: Sequence[int]) -> list[Row]:
        """Run every level at which requests wait at most LONGEST_WAIT_S, shortest waits first."""
        rows: list[Row] = []
        rates = {server.name: self._probe(server, workload) for server in self.servers}
        for level in sorted(levels):
            # A server may run all small requests before a large one. Until a cycle has passed, the responses are not
            # the mix that was sent: settle that long, and measure twice as long for enough requests.
            waits = {name: level * workload.cycle / rate for name, rate in rates.items()}
            chosen = [server for server in self.servers if waits[server.name] <= LONGEST_WAIT_S]
            for name, wait_s in waits.items():
                if wait_s > LONGEST_WAIT_S:
                    print(f"skipped: {workload.name}, {level} in flight, {name}: a request may wait {wait_s:.0f} s")
            plans = {
                server.name: Plan(
                    server.port,
                    workload.requests,
                    connections=level,
                    settle_s=max(1.0, waits[server.name]),
                    window_s=max(self.window_s, 2 * waits[server.name]),
                )
                for server in chosen
            }
            for row in self._rows(workload, f"{level} in flight", chosen, plans):
                rates[row.server] = max(row.median.requests_per_s, 1e-3)
                rows.append(row)
        return rows

    def open(self, workload: Workload, closed: Sequence[Row]) -> list[Row]:
        """Run at 50 and 80 % of each server's capacity, against every server whose own capacity is at least that."""
        rows: list[Row] = []
        capacity: dict[str, float] = {}
        for row in closed:
            if row.workload == workload.name:
                capacity[row.server] = max(capacity.get(row.server, 0.0), row.median.requests_per_s)
        for owner, most in sorted(capacity.items(), key=lambda item: item[1]):
            able = [server for server in self.servers if capacity[server.name] >= most]
            for share in (0.5, 0.8):
                plans = {
                    server.name: Plan(
                        server.port, workload.requests, OPEN_LOOP_CONNECTIONS, self.window_s, rate=share * most
                    )
                    for server in able
                }
                rows += self._rows(workload, f"{share:.0%} of {owner}'s most", able, plans)
        return rows

    def _probe(self, server: RunningServer, workload: Workload) -> float:
        """Warm the server up; return roughly the requests/s of one connection, over a fair sample of them."""
        self.load.run(Plan(server.port, workload.requests, 2, settle_s=0.0, window_s=2.0))
        window_s = 2.0
        while True:
            plan = Plan(server.port, workload.requests, 1, settle_s=0.0, window_s=window_s)
            responses = self.load.run(plan)
            if len(responses.status) >= workload.cycle or window_s > 30.0:
                return len(responses.status) / float(responses.ended.max() - responses.due.min())
            window_s *= 2

    def _rows(
        self, workload: Workload, load: str, servers: Sequence[RunningServer], plans: dict[str, Plan]
    ) -> list[Row]:
        rounds: dict[str, list[Round]] = {server.name: [] for server in servers}
        for number in range(self.rounds):
            for server in servers if number % 2 == 0 else reversed(servers):
                measured = run_round(self.load, server, plans[server.name])
                rounds[server.name].append(measured)
                line = f"{workload.name}, {load}, {server.name}, round {number + 1} of {self.rounds}"
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
