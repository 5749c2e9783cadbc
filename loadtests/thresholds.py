"""Thresholds of a scenario, checked at its end in locust's statistics and the server's metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from locust import events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.stats import RequestStats

from benchmarks.lib.scrape import Samples, scrape
from loadtests import report
from loadtests.users import late_s, options_of

__all__ = ["Threshold", "enforce", "violations"]

# Counters of the server that must not grow during a test.
MUST_NOT_GROW = ("embert_engine_restarts_total", "embert_hung_processes_total", "embert_padding_tokens_total")

LATE_MS = 20.0  # p99 of how late locust sends; above it locust is the limit


@dataclass(frozen=True, slots=True)
class Threshold:
    """Limits for the requests with this name in the report."""

    name: str
    p99_ms: float
    failed: float = 0.0  # the share that may fail


def violations(stats: RequestStats, thresholds: tuple[Threshold, ...], growth: Samples | None) -> list[str]:
    """Return a sentence for each threshold that was exceeded, and for each counter that grew but must not."""
    sentences = []
    for each in thresholds:
        entry = stats.get(each.name, "POST")
        if not entry.num_requests:
            sentences.append(f"{each.name}: no request was answered")
            continue
        p99_ms = entry.get_response_time_percentile(0.99)
        if p99_ms > each.p99_ms:
            sentences.append(f"{each.name}: p99 is {p99_ms:g} ms, over {each.p99_ms:g} ms")
        if entry.fail_ratio > each.failed:
            sentences.append(f"{each.name}: {entry.fail_ratio:.2%} failed, over {each.failed:.2%}")
    grown = {} if growth is None else {name: growth.total(name) for name in MUST_NOT_GROW}
    return [*sentences, *(f"{name} grew by {times:g}" for name, times in grown.items() if times > 0)]


def enforce(*thresholds: Threshold) -> None:
    """Check these thresholds when the test ends. `--p99-ms` replaces the limit of the first."""
    before: list[Samples] = []

    @events.init_command_line_parser.add_listener
    def add_options(parser: LocustArgumentParser) -> None:
        parser.add_argument("--p99-ms", type=float, help=f"limit for {thresholds[0].name!r}, ms")

    @events.test_start.add_listener
    def begin(environment: Environment, **_: Any) -> None:
        before.append(_scrape(environment))

    @events.quitting.add_listener
    def end(environment: Environment, **_: Any) -> None:
        options = options_of(environment)
        first = thresholds[0] if options.p99_ms is None else replace(thresholds[0], p99_ms=options.p99_ms)
        growth = _scrape(environment) - before[0] if before and before[0].values else None
        sentences = violations(environment.stats, (first, *thresholds[1:]), growth)
        server = {} if growth is None else report.server_figures(growth)
        report.write(options, {**_locust_figures(environment), **server}, sentences)
        if sentences:
            environment.process_exit_code = 1


def _locust_figures(environment: Environment) -> dict[str, str]:
    """Return whether locust was the limit; if it was, its figures say little of the server."""
    late_ms = sorted(late_s)[int(0.99 * len(late_s))] * 1e3 if late_s else 0.0
    full = late_ms > LATE_MS or getattr(environment.runner, "cpu_warning_emitted", False)
    return {"limit": "locust itself" if full else "not locust", "locust was late, p99": f"{late_ms:.2f} ms"}


def _scrape(environment: Environment) -> Samples:
    """Return the server's metrics; where they cannot be fetched, print why and return none."""
    options = options_of(environment)
    key, url = options.key, f"{environment.host or options.host}/metrics"
    try:
        return scrape(url, {"authorization": f"Bearer {key}"} if key else None)
    except OSError as error:
        print(f"no server metrics: {url}: {error}")
        return Samples({})
