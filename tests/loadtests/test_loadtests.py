"""Short load tests against a real server. Importing locust changes a process, so it runs in a separate process."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.live import ROOT, STAND_IN, Live, environment, live

KEY = ("--key", "right")
BUSY = ("--late-ms", "60000")  # a machine that does other work sends late, which is not what is tested


@pytest.fixture(scope="module")
def guarded() -> Iterator[Live]:
    """A server that requires the key."""
    with live(*STAND_IN, "--api-key", "right") as running:
        yield running


def told(folder: Path) -> dict[tuple[str, str], tuple[str, str, str]]:
    """Result, limit and measured value by what has the limit, as the report tells them."""
    with (folder / "report_thresholds.csv").open() as file:
        return {
            (row["of"], row["what"]): (row["result"], row["limit"], row["measured"]) for row in csv.DictReader(file)
        }


def run(scenario: str, host: str, report: Path, *options: str, seconds: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtests", scenario, "--host", host, "--report", str(report)]
    command += ["--seconds", str(seconds)]
    return subprocess.run(
        [*command, *options], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )


def test_a_scenario_and_its_report(guarded: Live, tmp_path: Path) -> None:
    done = run("soak", guarded.url, tmp_path, "--rate", "20", "--p99-ms", "60000", *KEY, *BUSY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "THRESHOLDS all thresholds were kept (exit status 0)" in done.stdout
    with (tmp_path / "report_server.csv").open() as file:
        figures = dict(list(csv.reader(file)))
    assert int(figures["requests 200"].replace(",", "")) > 0
    assert figures["padding_tokens"] == "0"
    assert figures["inference, p50"].endswith(" ms")
    limits = told(tmp_path)
    assert {result for result, _, _ in limits.values()} == {"kept"}
    assert limits["query", "p99"][1] == "60000 ms"
    assert limits["query", "failed"] == ("kept", "0.00%", "0.00%")
    assert limits["embert_engine_restarts_total", "growth"] == ("kept", "0", "0")
    assert float(limits["locust", "sent late, p99"][2].removesuffix(" ms")) >= 0
    with (tmp_path / "report_stats.csv").open() as file:
        (query,) = [row for row in csv.DictReader(file) if row["Name"] == "query"]
    assert int(query["Request Count"]) > 0
    assert query["Failure Count"] == "0"
    page = (tmp_path / "report.html").read_text()
    _, _, body = page.rpartition("<body>")
    assert body.startswith("<section"), "thresholds come first"
    assert body.index("all thresholds were kept") < body.index("<td>60000 ms</td>") < body.index('<div id="root">')
    assert "<td>inference, p50</td>" in body


def test_locust_itself_as_documented(guarded: Live, tmp_path: Path) -> None:
    """The command of docs/operations.md, with the key in the environment; a broken threshold sets the exit status."""
    page = (ROOT / "docs" / "operations.md").read_text()
    (command,) = re.findall(r"^\$ (locust -f loadtests/queries\.py --host .*)$", page, re.MULTILINE)
    for ours, theirs in (("https://embeddings.example", guarded.url), ("--run-time 5m", "--run-time 2s")):
        command = command.replace(ours, theirs)
    words = command.split()
    html = ("--html", str(tmp_path / "report.html"), "--csv", str(tmp_path / "report"))
    done = subprocess.run(
        [Path(sys.executable).with_name("locust"), *words[1:], "--p99-ms", "0.001", *html, *BUSY],
        cwd=ROOT, env=environment({"EMBERT_API_KEY": "right"}),
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "THRESHOLDS a threshold was exceeded (exit status 1)" in done.stdout
    result, limit, measured = told(tmp_path)["query", "p99"]
    assert (result, limit) == ("EXCEEDED", "0.001 ms")
    assert float(measured.removesuffix(" ms")) > 0.001
    assert f"<td>{measured}</td>" in (tmp_path / "report.html").read_text()


UNIT = """
from types import SimpleNamespace
from locust.stats import RequestStats
from benchmarks.lib.scrape import Samples
from loadtests.thresholds import generator_checks
from loadtests.users import late_s
from loadtests.verdict import Threshold, Verdict, checks, verdict

def counter(name, value):
    return Samples({(name, frozenset()): value})

stats = RequestStats()
for ms in range(1, 101):
    stats.log_request("POST", "query", ms, 10)
stats.log_error("POST", "query", "status 500")

def exceeded(threshold, growth=None):
    found = checks(stats, (threshold,), growth)
    return [(check.name, check.what, check.limit) for check in found if check.kept is False]

fine = Threshold("query", p99_ms=100, failed=0.02)
assert exceeded(fine) == []
assert exceeded(fine, counter("embert_requests_total", 7.0)) == []
assert exceeded(fine, counter("embert_engine_restarts_total", 1.0)) == [("embert_engine_restarts_total", "growth", "0")]
assert exceeded(Threshold("query", 90, 0.02)) == [("query", "p99", "90 ms")]
assert exceeded(Threshold("query", 100)) == [("query", "failed", "0.00%")]
assert exceeded(Threshold("bulk", 1)) == [("bulk", "successful requests", "at least 1")]

# An overload: refusing takes 5 ms, and times are those of successes.
flooded = RequestStats()
for _ in range(4):
    flooded.log_request("POST", "query", 9000, 10)
for _ in range(96):
    flooded.log_request("POST", "query refused", 5, 10)
told = {check.what: (check.measured, check.kept) for check in checks(flooded, (Threshold("query", 1000),), None)}
assert told["p99"] == ("9000 ms", False)
assert told["refused"] == ("96.00%", False)
assert told["failed"] == ("0.00%", True)

def generator(*late_ms, **runner):
    late_s.clear()
    late_s.extend(ms / 1e3 for ms in late_ms)
    options = SimpleNamespace(late_ms=20)
    return generator_checks(SimpleNamespace(runner=SimpleNamespace(**runner), parsed_options=options))

def full(*late_ms, **runner):
    return verdict([], generator(*late_ms, **runner)) == Verdict.INCONCLUSIVE

assert not full()
assert not full(*[10] * 100)
assert full(*[0] * 95, *[40] * 5)
assert not full(*[0] * 995, *[40] * 5)
assert full(*[0] * 100, cpu_warning_emitted=True)
assert full(*[0] * 100, worker_cpu_warning_emitted=True)

def decided(threshold, *late_ms):
    return verdict(checks(stats, (threshold,), None), generator(*late_ms))

slow, failing = Threshold("query", 90, 0.02), Threshold("query", 90)
assert decided(fine) == Verdict.KEPT == 0
assert decided(slow) == Verdict.EXCEEDED == 1
assert decided(slow, 40) == decided(fine, 40) == Verdict.INCONCLUSIVE == 2
assert decided(failing, 40) == Verdict.EXCEEDED
"""


def test_thresholds() -> None:
    done = subprocess.run([sys.executable, "-c", UNIT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
