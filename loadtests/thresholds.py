"""Thresholds of a scenario, checked at its end; the verdict is locust's exit status."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from locust import events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import WorkerRunner

from benchmarks.lib.scrape import Samples, scrape
from loadtests import report
from loadtests.users import late_s, options_of
from loadtests.verdict import Check, Threshold, checks, verdict

LATE_MS = 20.0  # p99 of how late locust sends; above it locust is the limit


def enforce(*thresholds: Threshold) -> None:
    """Check these thresholds when the test ends. `--p99-ms` replaces the limit of the first."""
    before: list[Samples] = []

    @events.init_command_line_parser.add_listener
    def add_options(parser: LocustArgumentParser) -> None:
        parser.add_argument("--p99-ms", type=float, help=f"limit for {thresholds[0].name!r}, ms")
        parser.add_argument(
            "--late-ms",
            type=float,
            default=LATE_MS,
            help="p99 of how late locust may send, ms; above it, exit status 2",
        )

    @events.test_start.add_listener
    def begin(environment: Environment, **_: Any) -> None:
        before.append(_scrape(environment))

    @events.quitting.add_listener
    def end(environment: Environment, **_: Any) -> None:
        if isinstance(environment.runner, WorkerRunner):
            return  # the master has everybody's figures
        options = options_of(environment)
        first = thresholds[0] if options.p99_ms is None else replace(thresholds[0], p99_ms=options.p99_ms)
        growth = _scrape(environment) - before[0] if before and before[0].values else None
        server = checks(environment.stats, (first, *thresholds[1:]), growth)
        broken = len(getattr(environment.runner, "exceptions", ()))
        server.append(Check("locust", "errors in the scenario", "0", f"{broken}", kept=not broken))
        generator = generator_checks(environment)
        decided = verdict(server, generator)
        report.write(options, {} if growth is None else report.server_figures(growth), [*server, *generator], decided)
        environment.process_exit_code = int(decided)


def generator_checks(environment: Environment) -> list[Check]:
    """Checks that locust kept up with its own plan, in all of its processes."""
    limit_ms, runner = options_of(environment).late_ms, environment.runner
    late_ms = sorted(late_s)[int(0.99 * len(late_s))] * 1e3 if late_s else 0.0
    full = any(getattr(runner, name, False) for name in ("cpu_warning_emitted", "worker_cpu_warning_emitted"))
    return [
        Check("locust", "sent late, p99", f"{limit_ms:g} ms", f"{late_ms:.2f} ms", kept=late_ms <= limit_ms),
        Check("locust", "its own CPU", "90 % of a core", "above" if full else "below", kept=not full),
    ]


@events.report_to_master.add_listener
def _report_lateness(data: dict[str, Any], **_: Any) -> None:
    """Send the master how late this worker was."""
    data["late_s"] = list(late_s)
    late_s.clear()


@events.worker_report.add_listener
def _collect_lateness(data: dict[str, Any], **_: Any) -> None:
    late_s.extend(data.get("late_s", ()))


def _scrape(environment: Environment) -> Samples:
    """Return the server's metrics; where they cannot be fetched, print why and return none."""
    options = options_of(environment)
    key, url = options.key, f"{environment.host or options.host}/metrics"
    try:
        return scrape(url, {"authorization": f"Bearer {key}"} if key else None)
    except OSError as error:
        print(f"no server metrics: {url}: {error}")
        return Samples({})
