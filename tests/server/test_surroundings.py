"""Logs without a reader, a full disk, a clock that jumps."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from tests.server.crowd import right
from tests.server.live import ROOT, STAND_IN, Live, live, until
from tests.server.stand_in import FAIL, HELD, SLEEP


def make_it_talk(server: Live) -> None:
    """Errors, a traceback's worth of them, and a restart: all of it is logged."""
    for _ in range(20):
        assert server.post("/embed", {"inputs": [[101, FAIL, 102]]}).status_code == 424
    server.kill_engine()
    server.wait_ready()
    until(lambda: right(server), what="a response")


# --- the disk ---


def test_nothing_is_written_to_a_disk_and_nothing_there_is_missed(tmp_path: Path) -> None:
    """A folder for temporary files that is full, gone or not to be written to: processes are replaced all the same."""
    with live(*STAND_IN, "--workers", "2", env={"TMPDIR": str(tmp_path / "missing")}) as server:
        assert right(server)
        texts = server.metrics()["embert_texts_total"]
        for pid in (server.engine_pids[0], server.http_pids[0]):
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: pid not in server.pids and len(server.pids) == 4, what="another process")  # type: ignore[misc]
            until(server.is_ready, what="readiness")
        until(lambda: right(server), what="a response")
        until(lambda: server.metrics()["embert_texts_total"] > texts, what="totals that go on")
        for pid in server.pids:  # of files, only memory, logs and what the system gives
            maps = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            assert not [each for each in maps if each.startswith(str(tmp_path))]
    assert list(tmp_path.iterdir()) == []


# --- logs ---


# --- the clock ---


@contextlib.contextmanager
def jumping_clock(folder: Path) -> Iterator[dict[str, str]]:
    """An environment whose Python processes live a year ago and in a year, by turns of a quarter of a second."""
    (folder / "sitecustomize.py").write_text(
        "import time\n"
        "_time, _time_ns = time.time, time.time_ns\n"
        "def _off():\n"
        "    return 31_536_000 if int(_time() * 4) % 2 else -31_536_000\n"
        "time.time = lambda: _time() + _off()\n"
        "time.time_ns = lambda: _time_ns() + _off() * 10**9\n"
    )
    yield {"PYTHONPATH": f"{folder}:{ROOT}"}


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path) -> None:
    timeouts = ("--engine-timeout", "10", "--client-timeout", "10", "--request-timeout", "30")
    with jumping_clock(tmp_path) as env, live(*STAND_IN, *timeouts, "--max-queue-tokens", "300", env=env) as server:
        pids = server.pids
        seen = server.metrics()['embert_engine_last_success_timestamp_seconds{engine="0"}']
        assert abs(seen - time.time()) > 30_000_000, "the clock does not jump"
        ends = time.monotonic() + 2
        while time.monotonic() < ends:
            assert right(server)
            health = server.get("/health")
            assert health.status_code == 200
            assert health.json()["last_success_age_s"] < 10
            time.sleep(0.03)  # two seconds are for eight jumps, and not for work
        began = time.monotonic()
        with server.held():
            late = server.post("/embed", {"inputs": [[101, HELD, 102]]}, headers={"x-request-timeout": "1.5"})
        assert late.status_code == 503
        assert time.monotonic() - began > 1.4
        assert 1 <= int(late.headers["retry-after"]) <= 60
        response = server.post("/embed", {"inputs": [[101, SLEEP + 5, 102]]})
        assert 0 < int(response.headers["x-inference-time"]) < 60_000  # a jump is a year
        assert int(response.headers["x-queue-time"]) < 60_000
        assert server.pids == pids
        assert server.metrics()["embert_request_duration_seconds_sum" + '{route="/embed"}'] < 60


def test_log_lines_are_whole() -> None:
    """Several processes write to one stderr; each line is one record of one of them."""
    with live(*STAND_IN, "--log-format", "json", "--workers", "2") as talkative:
        make_it_talk(talkative)
        lines = [json.loads(line) for line in talkative.log.splitlines()]
    assert {line["process"] for line in lines} >= {"supervisor", "engine-0"}
