"""Processes that hang or stop: the supervisor notices and replaces them, and clients get responses."""

from __future__ import annotations

import http.client
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.server.connections import one_to_each, post_on
from tests.server.crowd import GOOD, right, use_both_engines
from tests.server.live import STAND_IN, Live, live, until
from tests.server.stand_in import HANG, SLEEP, expected


def replaced(server: Live, pid: int) -> bool:
    return server.engine_pids not in ([], [pid])


def pid_of_engine(server: Live, index: int) -> int:
    """The process that listens on this engine's socket."""
    for pid in server.engine_pids:
        sockets = psutil.Process(pid).net_connections("unix")
        if any(Path(str(each.laddr)).name.startswith(f"engine-{index}.") for each in sockets):
            return pid
    raise AssertionError(f"no process listens as engine {index}")


@pytest.fixture(scope="module")
def watched() -> Iterator[Live]:
    """A forward of its engine counts as hung after four seconds."""
    with live(*STAND_IN, "--engine-timeout", "4") as server:
        yield server


def test_a_hanging_engine_is_replaced_and_what_hangs_every_engine_is_given_up_on(watched: Live) -> None:
    server = watched
    (pid,) = server.engine_pids
    response = server.post("/embed", {"inputs": [[101, HANG, 102]]})
    assert response.status_code == 424
    assert "lost twice" in response.json()["error"]
    until(lambda: replaced(server, pid), what="another engine process")
    server.wait_ready()
    assert right(server)
    # Slow is not hung.
    assert right(server, [101, SLEEP + 3, 102])
    metrics = server.metrics()
    assert metrics['embert_hung_processes_total{process="engine"}'] == 2
    assert metrics['embert_hung_processes_total{process="http"}'] == 0
    assert metrics['embert_engine_restarts_total{engine="0"}'] == 2
    assert metrics["embert_admitted_tokens"] == 0
    until(lambda: server.metrics()["embert_queue_tokens"] == 0, what="the engine's gauge")
    log = server.log
    hung = log.index("engine-0 hung: a forward runs for more than 4.0 s")
    assert hung < log.index("most recent call first") < log.index("stand_in.py", hung) < log.index("SIGKILL", hung)


def test_one_hung_engine_of_two_keeps_nobody_waiting() -> None:
    with live(*STAND_IN, "--device", "x:0,1", "--engine-timeout", "4") as server, ThreadPoolExecutor(26) as pool:
        use_both_engines(server)
        other = pid_of_engine(server, 1)
        # While the supervisor is stopped, nobody ends the engine that hangs.
        server.signal(signal.SIGSTOP)
        try:
            hanging = pool.submit(server.post, "/embed", {"inputs": [[101, HANG, 102]]})
            until(lambda: server.metrics()["embert_admitted_tokens"] == 3, what="the request that hangs")
            for number in range(24):
                assert right(server, [101, 1000 + number, 102])
            assert not hanging.done()
            # Half of the requests while neither responds goes to the one that hangs, and waits there.
            os.kill(other, signal.SIGSTOP)
            asked = [[101, 1000 + number, 102] for number in range(24)]
            waiting = [pool.submit(server.post, "/embed", {"inputs": [ids]}) for ids in asked]
            until(lambda: server.metrics()["embert_admitted_tokens"] == 25 * 3, what="all requests")
            os.kill(other, signal.SIGCONT)
            until(lambda: server.metrics()["embert_admitted_tokens"] == 13 * 3, what="the other engine's responses")
        finally:
            server.signal(signal.SIGCONT)
        # It is ended, and then the other one, which gets its request: all that waited with it get responses.
        for ids, response in zip(asked, waiting, strict=True):
            assert response.result().status_code == 200, response.result().text
            assert np.allclose(response.result().json(), [expected(ids)], atol=1e-5)
        assert hanging.result().status_code == 424
        until(lambda: [server.metrics()[f'embert_engine_up{{engine="{i}"}}'] for i in range(2)] == [1, 1])
        server.wait_ready()
        assert all(pool.map(lambda ids: right(server, ids), asked))


def test_a_stopped_engine_is_replaced(watched: Live) -> None:
    """Stopped between forwards, and with the lock of the interpreter held, so that none of its threads can tell."""
    server = watched
    (pid,) = server.engine_pids
    os.kill(pid, signal.SIGSTOP)
    until(lambda: replaced(server, pid), what="another engine process")
    until(lambda: right(server), what="a response")
    assert "engine-0 hung: no sign of life for more than 6.0 s" in server.log


def test_a_stopped_server_that_goes_on_replaces_nobody(watched: Live) -> None:
    """This is like a machine that slept."""
    server = watched
    server.wait_ready()
    pids = server.pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(7)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert right(server)
    time.sleep(1.5)
    assert server.pids == pids


def test_a_start_that_hangs_is_ended_and_told_of() -> None:
    options = ("--start-timeout", "1")
    with live(*STAND_IN, *options, env={"STAND_IN_LOAD": "hang"}, ready=False, status=1) as server:
        assert server.wait() == 1
        # How far it comes within a second, and whether the HTTP process is ready by then, is the machine's affair.
        doing = "(importing modules|loading the weights)"
        assert re.search(rf"engine-0 is still starting after \d s: {doing}", server.log)
        assert re.search(rf"engine-0 hung: not ready 1 s after its start \(--start-timeout\), {doing}", server.log)
        assert "failed to start 3 times; giving up" in server.log


BLOCK = """
import pathlib, signal, time

def block(*_):
    pathlib.Path(__file__).with_name("blocked").touch()  # next to the log
    time.sleep(3600)

signal.signal(signal.SIGUSR2, block)
"""


def test_hung_http_processes_are_replaced_and_the_others_respond() -> None:
    """One is stopped, of another only the event loop hangs; the third responds all the time."""
    with live(*STAND_IN, "--workers", "3", code=BLOCK) as server, one_to_each(server) as connections:
        engine = server.engine_pids
        (stopped, stuck), (well, good) = list(connections.items())[:2], list(connections.items())[2]
        stopped_pid, stuck_pid = stopped[0], stuck[0]
        began = time.monotonic()
        os.kill(stopped_pid, signal.SIGSTOP)
        os.kill(stuck_pid, signal.SIGUSR2)
        # What a process accepts before it hangs is lost with it.
        until(server.log_path.with_name("blocked").exists, what="a process whose event loop hangs")
        until(lambda: psutil.Process(stopped_pid).status() == psutil.STATUS_STOPPED, what="a stopped process")
        with ThreadPoolExecutor(8) as pool:
            # New connections: some fall to those that hang, and wait in their sockets' queues.
            asked = [pool.submit(server.post, "/embed", {"inputs": [GOOD]}, timeout=300) for _ in range(8)]
            while {stopped_pid, stuck_pid} & set(server.http_pids):
                sent = time.monotonic()
                assert post_on(good, {"inputs": [GOOD]})[0] == 200
                assert sent - began < 200, "a process that hangs lives on"
                time.sleep(0.25)
            took_s = time.monotonic() - began
            assert took_s > 30  # not before its time
            until(lambda: len(server.http_pids) == 3, what="three HTTP processes")
            assert {each.result().status_code for each in asked} == {200}
        assert well in server.http_pids
        assert server.engine_pids == engine
        for _, connection in (stopped, stuck):
            with pytest.raises((http.client.HTTPException, OSError)):
                post_on(connection, {"inputs": [GOOD]})
        assert server.log.count("hung: no sign of life for more than 32.0 s; killing it") == 2
        until(lambda: server.metrics()["embert_requests_in_flight"] == 1, what="what the processes publish")
        metrics = server.metrics()
        assert metrics['embert_hung_processes_total{process="http"}'] == metrics["embert_http_restarts_total"] == 2
        assert metrics['embert_hung_processes_total{process="engine"}'] == 0
        assert metrics["embert_admitted_tokens"] == 0
