"""Compares the measurements of a load test with its limits: kept, exceeded, or inconclusive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from locust.stats import RequestStats

from benchmarks.lib.scrape import Samples

REFUSED, FAILED = " refused", " failed"  # after a name: its requests without a success

# Counters of the server that must not grow during a test.
MUST_NOT_GROW = ("embert_engine_restarts_total", "embert_hung_processes_total", "embert_padding_tokens_total")


@dataclass(frozen=True, slots=True)
class Threshold:
    """Limits for the requests with this name in the report."""

    name: str
    p99_ms: float
    failed: float = 0.0  # the share that may fail
    refused: float = 0.0  # the share that may get 429


@dataclass(frozen=True, slots=True)
class Check:
    """One limit and what was measured."""

    name: str  # of requests, a counter, or locust
    what: str
    limit: str
    measured: str
    kept: bool | None  # None: could not be measured
    timed: bool = False  # whether a busy locust makes the measured value worse


class Verdict(IntEnum):
    """The exit status of a load test."""

    KEPT = 0
    EXCEEDED = 1
    INCONCLUSIVE = 2


def checks(stats: RequestStats, thresholds: Sequence[Threshold], growth: Samples | None) -> list[Check]:
    """Compare locust's statistics with the thresholds, and the growth of the server's counters with none at all."""
    results = []
    for each in thresholds:
        entry, refused, failed = (stats.get(f"{each.name}{what}", "POST") for what in ("", REFUSED, FAILED))
        sent = entry.num_requests + refused.num_requests + failed.num_requests
        if not entry.num_requests:
            results.append(Check(each.name, "successful requests", "at least 1", "0", kept=False))
        else:
            p99_ms = entry.get_response_time_percentile(0.99)
            limit, measured = f"{each.p99_ms:g} ms", f"{p99_ms:g} ms"
            results.append(Check(each.name, "p99", limit, measured, kept=p99_ms <= each.p99_ms, timed=True))
        for what, most, count in (
            ("failed", each.failed, entry.num_failures + failed.num_failures),
            ("refused", each.refused, refused.num_requests),
        ):
            share = count / sent if sent else 0.0
            results.append(Check(each.name, what, f"{most:.2%}", f"{share:.2%}", kept=share <= most))
    for name in MUST_NOT_GROW:
        if growth is None:
            results.append(Check(name, "growth", "0", "no metrics of the server", kept=None))
        else:
            times = growth.total(name)
            results.append(Check(name, "growth", "0", f"{times:g}", kept=times <= 0))
    return results


def verdict(server: Sequence[Check], generator: Sequence[Check]) -> Verdict:
    """Verdict of the checks of the server, given those of the load generator.

    A generator at its limit sends late and reads late, so its times say nothing of the server, good or bad. A failure,
    a lost engine or a missing response is one all the same.
    """
    exceeded = [check for check in server if check.kept is False]
    if any(not check.timed for check in exceeded):
        return Verdict.EXCEEDED
    if any(check.kept is False for check in generator):
        return Verdict.INCONCLUSIVE
    return Verdict.EXCEEDED if exceeded else Verdict.KEPT


def sentence(of: Verdict) -> str:
    """The verdict in words."""
    return {
        Verdict.KEPT: "all thresholds were kept",
        Verdict.EXCEEDED: "a threshold was exceeded",
        Verdict.INCONCLUSIVE: "inconclusive: locust itself was the limit, so its times say nothing of the server",
    }[of]
