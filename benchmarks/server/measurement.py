"""One measured round of a load against a server: rates, latencies, the CPU of both sides, and who was the limit.

And where the time of a request goes, as the server itself reports it in the Server-Timing header.
"""

from __future__ import annotations

import http.client
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.lib.load_generator import LoadGenerator
from benchmarks.lib.load_plan import Plan, Request, Responses
from benchmarks.lib.running_server import RunningServer

# Cores in use at which a process counts as saturated. A server's other threads wait for the interpreter lock.
CLIENT_FULL = 0.9
SERVER_FULL = 0.85
NO_LIMIT = "–"  # noqa: RUF001 - of an open loop: both sides kept up


@dataclass(frozen=True, slots=True)
class Round:
    """One round against one server: what fell into the measured window."""

    requests_per_s: float
    texts_per_s: float
    tokens_per_s: float
    p50_ms: dict[str, float]  # by kind of request
    p99_ms: dict[str, float]
    failed: int
    cpu_us: dict[str, float]  # CPU µs a request, by kind of process
    wakeups: dict[str, float]  # a request, by kind of process: how often a thread gave up its core to wait
    cores: dict[str, float]  # cores in use, by kind of process
    client_cores: float
    late_p99_ms: float  # how late the load itself sent
    limit: str  # "client", "HTTP processes", "engine", "server", or NO_LIMIT


def run_round(load: LoadGenerator, server: RunningServer, plan: Plan) -> Round:
    """Run `plan` against `server`."""
    spent: list[dict[str, float]] = []
    waited: list[dict[str, int]] = []

    def note() -> None:
        spent.append(server.cpu_s())
        waited.append(server.wakeups())

    responses = load.run(plan, at_window=note)
    return _figures(plan, responses, (spent[0], spent[1]), server.count(), (waited[0], waited[1]))


def _figures(
    plan: Plan,
    responses: Responses,
    cpu_s: tuple[dict[str, float], dict[str, float]],
    processes: dict[str, int],
    waits: tuple[dict[str, int], dict[str, int]] = ({}, {}),
) -> Round:
    # A closed loop counts responses in the window, an open one requests due in it, however late the response.
    moment = responses.ended if plan.rate is None else responses.due
    inside = (moment >= responses.opened) & (moment < responses.opened + plan.window_s)
    good = inside & (responses.status == plan.status)
    count = max(1, int(good.sum()))
    milliseconds = (responses.ended - responses.due) * 1e3
    kinds = np.array([request.kind for request in plan.requests])[responses.request]
    p50 = {kind: _percentile(milliseconds[good & (kinds == kind)], 50) for kind in dict.fromkeys(kinds.tolist())}
    late_p99_ms = _percentile(responses.late_s * 1e3, 99)
    before, after = cpu_s
    spent = {kind: seconds - before.get(kind, 0.0) for kind, seconds in after.items()}
    cores = {kind: seconds / plan.window_s for kind, seconds in spent.items()}
    late = plan.rate is not None and late_p99_ms > max(1.0, min(p50.values()) / 4)
    if late or responses.busiest_client > CLIENT_FULL:
        limit = "client"
    else:
        limit = _server_limit(cores, processes) if plan.rate is None else NO_LIMIT
    return Round(
        requests_per_s=float(good.sum()) / plan.window_s,
        texts_per_s=float(np.array([r.texts for r in plan.requests])[responses.request][good].sum()) / plan.window_s,
        tokens_per_s=float(np.array([r.tokens for r in plan.requests])[responses.request][good].sum()) / plan.window_s,
        p50_ms=p50,
        p99_ms={kind: _percentile(milliseconds[good & (kinds == kind)], 99) for kind in p50},
        failed=int((inside & ~good).sum()),
        cpu_us={kind: seconds / count * 1e6 for kind, seconds in spent.items()},
        wakeups={kind: (number - waits[0].get(kind, 0)) / count for kind, number in waits[1].items()},
        cores=cores,
        client_cores=responses.client_cores,
        late_p99_ms=late_p99_ms,
        limit=limit,
    )


def _server_limit(cores: dict[str, float], processes: dict[str, int]) -> str:
    if "engine" not in cores:
        return "server"
    full = cores.get("http", 0.0) > SERVER_FULL * processes.get("http", 1)
    return "HTTP processes" if full else "engine"


def _percentile(values: np.ndarray, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else float("nan")


def median(rounds: Sequence[Round]) -> Round:
    """Return the median of each figure over the rounds. Failures add up."""

    def of_each(dicts: Sequence[dict[str, float]]) -> dict[str, float]:
        return {key: statistics.median(d[key] for d in dicts if key in d) for key in dicts[0]}

    return Round(
        requests_per_s=statistics.median(r.requests_per_s for r in rounds),
        texts_per_s=statistics.median(r.texts_per_s for r in rounds),
        tokens_per_s=statistics.median(r.tokens_per_s for r in rounds),
        p50_ms=of_each([r.p50_ms for r in rounds]),
        p99_ms=of_each([r.p99_ms for r in rounds]),
        failed=sum(r.failed for r in rounds),
        cpu_us=of_each([r.cpu_us for r in rounds]),
        wakeups=of_each([r.wakeups for r in rounds]),
        cores=of_each([r.cores for r in rounds]),
        client_cores=statistics.median(r.client_cores for r in rounds),
        late_p99_ms=statistics.median(r.late_p99_ms for r in rounds),
        limit="client" if any(r.limit == "client" for r in rounds) else statistics.mode(r.limit for r in rounds),
    )


def latency_breakdown_ms(port: int, requests: Sequence[Request], count: int = 200) -> dict[str, float]:
    """Send requests one by one over one connection; return medians in ms by stage, and `client`, the whole round trip.

    Each of `requests` is sent once as a warm-up, then `count` of them are measured.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port)
    stages: dict[str, list[float]] = {}
    for number in range(len(requests) + count):
        payload = requests[number % len(requests)].payload
        head, body = payload.split(b"\r\n\r\n", 1)
        began = time.perf_counter()
        connection.request("POST", head.split(b" ", 2)[1].decode(), body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        took_ms = (time.perf_counter() - began) * 1e3
        if number < len(requests):
            continue
        for name, ms in (*re.findall(r"(\w+);dur=([\d.]+)", response.headers["server-timing"]), ("client", took_ms)):
            stages.setdefault(name, []).append(float(ms))
    connection.close()
    return {name: statistics.median(values) for name, values in stages.items()}
