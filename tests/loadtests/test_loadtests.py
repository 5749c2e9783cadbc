"""Short load tests against a real server. Importing locust changes a process, so it gets a process of its own."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.live import ROOT, STAND_IN, Live, environment, live
from tests.server.models import build_classifier

KEY = ("--key", "right")


@pytest.fixture(scope="module")
def guarded() -> Iterator[Live]:
    """A server that requires the key."""
    with live(*STAND_IN, "--api-key", "right") as running:
        yield running


def run(scenario: str, host: str, report: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtests", scenario, "--host", host, "--report", str(report), "--seconds", "2"]
    return subprocess.run(
        [*command, *options], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize("scenario", ["queries", "soak"])
def test_a_scenario_and_its_report(guarded: Live, tmp_path: Path, scenario: str) -> None:
    done = run(scenario, guarded.url, tmp_path, "--rate", "20", "--p99-ms", "20000", *KEY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all thresholds were kept" in done.stdout
    with (tmp_path / "report_server.csv").open() as file:
        told = dict(list(csv.reader(file)))
    assert int(told["requests 200"]) > 0  # two seconds, of which a busy machine takes most
    assert told["padding_tokens"] == "0"
    assert float(told["locust was late, p99"].removesuffix(" ms")) >= 0
    assert told["inference, p50"].endswith(" ms")
    with (tmp_path / "report_stats.csv").open() as file:
        (query,) = [row for row in csv.DictReader(file) if row["Name"] == "query"]
    assert int(query["Request Count"]) > 0
    assert query["Failure Count"] == "0"
    page = (tmp_path / "report.html").read_text()
    assert "<li>all thresholds were kept</li>" in page
    assert "<td>inference, p50</td>" in page


def test_reranking(tmp_path: Path) -> None:
    folder = build_classifier(tmp_path / "model", "relevance")
    with live(str(folder), *STAND_IN) as server:
        done = run("rerank", server.url, tmp_path / "report", "--p99-ms", "20000")
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "report" / "report_stats.csv").open() as file:
        (row,) = [row for row in csv.DictReader(file) if row["Name"] == "32 passages reranked"]
    assert int(row["Request Count"]) > 0
    assert row["Failure Count"] == "0"


def test_the_time_that_importing_takes_is_not_the_tests() -> None:
    program = """
import gevent, time
from locust import events
from loadtests import users
gevent.spawn_later(10, lambda: None)  # for the first timer of a round gevent looks at the clock itself
imported = time.monotonic() + 0.5
while time.monotonic() < imported:
    pass
events.init.fire(environment=None, runner=None, web_ui=None)
began = time.monotonic()
gevent.spawn_later(0.4, lambda: None).join()
print(time.monotonic() - began)
"""
    command = [sys.executable, "-c", program]
    lasted = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240, check=True
    )
    assert float(lasted.stdout) > 0.39


def test_a_threshold_that_is_broken_sets_the_exit_status(guarded: Live, tmp_path: Path) -> None:
    done = run("queries", guarded.url, tmp_path, "--rate", "20", "--p99-ms", "0.001", *KEY)
    assert done.returncode == 1
    assert "THRESHOLD query: p99 is" in done.stdout
    assert "<li>query: p99 is" in (tmp_path / "report.html").read_text()


def test_failures_set_the_exit_status(guarded: Live, tmp_path: Path) -> None:
    wrong = run("queries", guarded.url, tmp_path, "--rate", "20", "--key", "wrong")
    assert wrong.returncode == 1
    assert "THRESHOLD query: 100.00% failed, over 0.00%" in wrong.stdout


def test_refusals_are_told_apart_and_a_spike_passes(tmp_path: Path) -> None:
    with live(*STAND_IN, "--max-queue-tokens", "20", "--max-batch-requests", "1", env={"STAND_IN_S": "0.02"}) as server:
        done = run("spike", server.url, tmp_path, "--rate", "20", "--p99-ms", "20000")
        assert done.returncode == 0, done.stdout + done.stderr
        with (tmp_path / "report_stats.csv").open() as file:
            names = {row["Name"]: int(row["Request Count"]) for row in csv.DictReader(file)}
        assert names["query refused"] > 5
        assert names["query"] > 5


UNIT = """
from types import SimpleNamespace
from locust.stats import RequestStats
from benchmarks.lib.scrape import Samples
from loadtests.thresholds import LATE_MS, Threshold, _locust_figures, violations
from loadtests.users import late_s

def counter(name, value):
    return Samples({(name, frozenset()): value})

stats = RequestStats()
for ms in range(1, 101):
    stats.log_request("POST", "query", ms, 10)
stats.log_error("POST", "query", "status 500")
fine = Threshold("query", p99_ms=100, failed=0.02)
assert violations(stats, (fine,), None) == []
assert violations(stats, (fine,), counter("embert_requests_total", 7.0)) == []
lost = counter("embert_engine_restarts_total", 1.0)
assert violations(stats, (fine,), lost) == ["embert_engine_restarts_total grew by 1"]
(slow,) = violations(stats, (Threshold("query", 90, 0.02),), None)
assert slow.startswith("query: p99 is ") and slow.endswith(" ms, over 90 ms")
assert violations(stats, (Threshold("query", 100),), None) == ["query: 1.00% failed, over 0.00%"]
assert violations(stats, (Threshold("bulk", 1),), None) == ["bulk: no request was answered"]

def limit(*late_ms, warned=False):
    late_s.clear()
    late_s.extend(ms / 1e3 for ms in late_ms)
    return _locust_figures(SimpleNamespace(runner=SimpleNamespace(cpu_warning_emitted=warned)))["limit"]

assert limit() == "not locust"
assert limit(*[LATE_MS / 2] * 100) == "not locust"
assert limit(*[0] * 95, *[2 * LATE_MS] * 5) == "locust itself"
assert limit(*[0] * 995, *[2 * LATE_MS] * 5) == "not locust"
assert limit(*[0] * 100, warned=True) == "locust itself"
"""


def test_thresholds() -> None:
    done = subprocess.run([sys.executable, "-c", UNIT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
