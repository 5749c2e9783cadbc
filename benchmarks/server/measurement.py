"""One run of a load against one server: what came of it, what it cost on both sides, and who was the limit."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.lib.load_generator import Load
from benchmarks.lib.load_worker import Answers, Plan
from benchmarks.lib.running_server import Serving

__all__ = ["Round", "median", "run_round"]

CLIENT_FULL = 0.9  # of one core: a client process has no more to give
SERVER_FULL = 0.85  # ... and a server's, whose other threads wait for its lock
NO_LIMIT = "–"  # noqa: RUF001 - an open loop that everybody kept up with


@dataclass(frozen=True, slots=True)
class Round:
    """One run of one server, in the window that is measured."""

    requests_per_s: float
    texts_per_s: float
    tokens_per_s: float
    p50_ms: dict[str, float]  # by kind of request
    p99_ms: dict[str, float]
    failed: int
    cpu_us: dict[str, float]  # CPU µs a request by kind of process
    cores: dict[str, float]  # ... and cores in use, of all processes of the kind
    client_cores: float
    late_p99_ms: float  # by how much the load's own timer was late
    limit: str  # "client", "HTTP processes", "engine", "server", or NO_LIMIT


def run_round(load: Load, serving: Serving, plan: Plan) -> Round:
    """Run `plan` against `serving`."""
    spent: list[dict[str, float]] = []
    answers = load.run(plan, at_window=lambda: spent.append(serving.cpu_s()))
    return _figures(plan, answers, (spent[0], spent[1]), serving.count())


def _figures(
    plan: Plan, answers: Answers, cpu_s: tuple[dict[str, float], dict[str, float]], processes: dict[str, int]
) -> Round:
    # A closed loop is judged by what came back in the window, an open one by what was due in it, however late it came.
    moment = answers.answered if plan.rate is None else answers.due
    inside = (moment >= answers.opened) & (moment < answers.opened + plan.window_s)
    good = inside & (answers.status == 200)
    count = max(1, int(good.sum()))
    milliseconds = (answers.answered - answers.due) * 1e3
    kinds = np.array([request.kind for request in plan.requests])[answers.request]
    p50 = {kind: _percentile(milliseconds[good & (kinds == kind)], 50) for kind in dict.fromkeys(kinds.tolist())}
    late_p99_ms = _percentile(answers.late_s * 1e3, 99)
    before, after = cpu_s
    spent = {kind: seconds - before.get(kind, 0.0) for kind, seconds in after.items()}
    cores = {kind: seconds / plan.window_s for kind, seconds in spent.items()}
    late = plan.rate is not None and late_p99_ms > max(1.0, min(p50.values()) / 4)
    if late or answers.busiest_client > CLIENT_FULL:
        limit = "client"
    else:
        limit = _server_limit(cores, processes) if plan.rate is None else NO_LIMIT
    return Round(
        requests_per_s=float(good.sum()) / plan.window_s,
        texts_per_s=float(np.array([r.texts for r in plan.requests])[answers.request][good].sum()) / plan.window_s,
        tokens_per_s=float(np.array([r.tokens for r in plan.requests])[answers.request][good].sum()) / plan.window_s,
        p50_ms=p50,
        p99_ms={kind: _percentile(milliseconds[good & (kinds == kind)], 99) for kind in p50},
        failed=int((inside & ~good).sum()),
        cpu_us={kind: seconds / count * 1e6 for kind, seconds in spent.items()},
        cores=cores,
        client_cores=answers.client_cores,
        late_p99_ms=late_p99_ms,
        limit=limit,
    )


def _server_limit(cores: dict[str, float], processes: dict[str, int]) -> str:
    if "engine" not in cores:
        return "server"
    full = cores.get("api", 0.0) > SERVER_FULL * processes.get("api", 1)
    return "HTTP processes" if full else "engine"


def _percentile(values: np.ndarray, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else float("nan")


def median(rounds: Sequence[Round]) -> Round:
    """The median of each figure over the rounds; failures are added up."""

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
        cores=of_each([r.cores for r in rounds]),
        client_cores=statistics.median(r.client_cores for r in rounds),
        late_p99_ms=statistics.median(r.late_p99_ms for r in rounds),
        limit="client" if any(r.limit == "client" for r in rounds) else statistics.mode(r.limit for r in rounds),
    )
