"""A disk that takes nothing, logs of several processes, and a clock that jumps."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from tests.server.crowd import published, right
from tests.server.live import STAND_IN, live, until
from tests.server.stand_in import FAIL, HELD, SLEEP


def test_nothing_is_written_to_a_disk_and_log_lines_are_whole(tmp_path: Path) -> None:
    """Without a folder for temporary files processes are replaced all the same. All of them write to one stderr."""
    options = ("--workers", "2", "--log-format", "json")
    with live(*STAND_IN, *options, env={"TMPDIR": str(tmp_path / "missing")}) as server:
        assert right(server)
        for _ in range(20):
            assert server.post("/embed", {"inputs": [[101, FAIL, 102]]}).status_code == 424  # which is logged
        before = published(server)
        for pid in (server.engine_pids[0], server.http_pids[0]):
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: pid not in server.pids and len(server.pids) == 4, what="another process")  # type: ignore[misc]
            until(server.is_ready, what="readiness")
        until(lambda: right(server), what="a response")
        for total in ("embert_texts_total", "embert_batches_total"):  # which go on
            until(lambda name=total: server.metrics()[name] > before[name], what=total)  # type: ignore[misc]
        for pid in server.pids:  # of files, only memory, logs and what the system gives
            maps = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            assert not [each for each in maps if each.startswith(str(tmp_path))]
        lines = [json.loads(line) for line in server.log.splitlines()]
    assert {line["process"] for line in lines} >= {"supervisor", "engine-0"}
    assert list(tmp_path.iterdir()) == []


# Processes live a year ago and in a year, by turns of a quarter of a second.
JUMPS = """
import time
_time, _time_ns = time.time, time.time_ns
def _off():
    return 31_536_000 if int(_time() * 4) % 2 else -31_536_000
time.time = lambda: _time() + _off()
time.time_ns = lambda: _time_ns() + _off() * 10**9
"""


def test_a_clock_that_jumps_changes_nothing() -> None:
    timeouts = ("--engine-timeout", "10", "--client-timeout", "10", "--request-timeout", "30")
    with live(*STAND_IN, *timeouts, "--max-queue-tokens", "300", code=JUMPS) as server:
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
