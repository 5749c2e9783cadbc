"""Signals, drains and the end of the server: children end in order, and no client is left without a response."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import time
from pathlib import Path

import httpx
import psutil

from tests.server.crowd import PATIENCE_S, post
from tests.server.live import PATIENT, STAND_IN, live, until
from tests.server.stand_in import HELD


def test_sigterm_lets_requests_in_flight_finish() -> None:
    with live(*STAND_IN, "--max-queue-tokens", "100", env=PATIENT) as server:
        server.wait_announced()  # or its log ends without what has become of the requests
        responses: list[httpx.Response] = []
        with server.held(), server.client() as client:
            thread = post(server, [[101, HELD, 102]], responses)
            until(lambda: server.metrics()["embert_admitted_tokens"] == 3, what="the request in flight")
            idle = http.client.HTTPConnection("127.0.0.1", server.ports[0], timeout=PATIENCE_S)
            with contextlib.closing(idle):
                idle.request("GET", "/livez")  # so that it is accepted
                idle.getresponse().read()
                server.signal(signal.SIGTERM)
                assert idle.sock.recv(1) == b""
            until(lambda: client.get("/readyz").json()["status"] == "draining", what="readiness to flip")
            for text in ("too late", "too many words " * 50):  # 503 even where there is no room in the queue
                refused = client.post("/embed", json={"inputs": text})
                assert refused.status_code == 503
                assert refused.headers["retry-after"]
                assert refused.headers["connection"] == "close"
        thread.join(PATIENCE_S)
        assert [response.status_code for response in responses] == [200]
        assert responses[0].headers["connection"] == "close"
        assert server.wait() == 0
        assert "1 answered, 2 refused, 0 lost" in server.log.splitlines()[-1]


def test_a_signal_to_all_processes_at_once() -> None:
    """systemd does this by default. The engine still sends the results that the HTTP processes wait for.

    Signals that stop nothing come first.
    """
    with live(*STAND_IN, "--workers", "2", env=PATIENT) as server:
        server.wait_announced()  # each process has its handlers
        pids = server.pids
        for number in (signal.SIGHUP, signal.SIGUSR2, signal.SIGALRM):
            for pid in pids:
                os.kill(pid, number)
        until(lambda: "received SIGHUP" in server.log, what="the signal that reads files again")
        assert server.post("/embed", {"inputs": "a"}).status_code == 200
        assert server.pids == pids
        responses: list[httpx.Response] = []
        with server.held() as runs:
            threads = [post(server, [[101, HELD, 102]], responses) for _ in range(3)]
            until(lambda: server.metrics()["embert_admitted_tokens"] == 9 and runs.exists(), what="requests in flight")
            for pid in server.pids:
                os.kill(pid, signal.SIGTERM)
            until(lambda: "the supervisor stops this process" in server.log, what="the engine's signal")
        for thread in threads:
            thread.join(PATIENCE_S)
        assert [response.status_code for response in responses] == [200] * 3
        assert server.wait() == 0
        assert "ERROR" not in server.log


def test_drain_timeout_bounds_the_wait() -> None:
    with live(*STAND_IN, "--drain-timeout", "1", env=PATIENT) as server, server.held():
        responses: list[httpx.Response] = []
        thread = post(server, [[101, HELD, 102]], responses)
        until(lambda: server.metrics()["embert_requests_in_flight"] >= 2, what="the request in flight")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        thread.join(PATIENCE_S)
        (response,) = responses
        assert response.status_code == 503  # and no connection that breaks
        assert "shutting down" in response.json()["error"]


def test_a_second_signal_ends_at_once() -> None:
    with live(*STAND_IN, status=1, env=PATIENT) as server, server.held():
        server.wait_announced()
        responses: list[httpx.Response] = []
        thread = post(server, [[101, HELD, 102]], responses)
        until(lambda: server.metrics()["embert_requests_in_flight"] >= 2, what="the request in flight")
        # `timeout` and shells send a signal twice, which does not count as a second one: here both arrive at once.
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
            server.signal(number)
        until(lambda: "received SIG" in server.log, what="the first signal")
        time.sleep(0.8)
        assert server.process.poll() is None
        server.signal(signal.SIGTERM)
        assert server.wait() == 1
        assert "0 answered, 0 refused, 1 lost" in server.log.splitlines()[-1]
        thread.join(PATIENCE_S)


def test_a_signal_stops_a_loading_server() -> None:
    with live(*STAND_IN, "--drain-timeout", "300", loading=True) as server:
        until(lambda: server.engine_pids and server.http_pids, what="the children")
        until(lambda: server.try_get("/livez"), what="a response")
        server.signal(signal.SIGQUIT)
        assert server.wait() == 0


def test_an_engine_that_never_comes_back_ends_the_server(tmp_path: Path) -> None:
    """A service manager then starts another one: /livez alone would not show the outage."""
    broken = tmp_path / "broken"
    env = {"STAND_IN_EXIT_FILE": str(broken), **PATIENT}
    constants = {"embert.server.supervisor.hangs.GIVE_UP_AFTER_S": 1.0}
    with live(*STAND_IN, env=env, constants=constants, status=1) as server, server.held():
        server.wait_announced()
        broken.touch()
        responses: list[httpx.Response] = []
        thread = post(server, [[101, HELD, 102]], responses)
        until(lambda: server.metrics()["embert_requests_in_flight"] >= 2, what="the request in flight")
        os.kill(server.engine_pids[0], signal.SIGKILL)
        assert server.wait() == 1
        assert re.search(r"no engine has been available for \d+ s; exiting", server.log)
        thread.join(PATIENCE_S)
        assert [response.status_code for response in responses] == [503]  # and no connection that breaks


def test_children_do_not_outlive_a_killed_supervisor() -> None:
    with live(*STAND_IN, status=-signal.SIGKILL) as server:
        children = server.http_pids + server.engine_pids
        server.signal(signal.SIGKILL)
        until(lambda: not alive(children), what="the end of the children")


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
