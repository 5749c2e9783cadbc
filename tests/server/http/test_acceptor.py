"""Connections are spread evenly over the HTTP processes, and none waits for a process that does not run."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from array import array

import psutil
import pytest

from embert.server.http.acceptor import SILENT_S, ConnectionCounts
from tests.server.connections import EVEN, connect, connection_counts
from tests.server.live import STAND_IN, live, until

GET = b"GET /livez HTTP/1.1\r\nhost: h\r\n\r\n"


def numbers(*values: float) -> memoryview[float]:
    """Numbers as they are in shared memory."""
    return memoryview(array("d", values)).cast("B").cast("d")


@pytest.mark.parametrize(
    ("own", "others", "waiting", "room"),
    [
        (0, [], 5, 5),
        (7, [math.inf, math.inf], 1, 1),  # they do not accept
        (3, [3, 4], 1, 1),
        (4, [3, 4], 1, 0),
        (3, [5, 5], 0, 3),
        (0, [0, 0, 0], 512, 128),  # a burst is shared at once
        (9, [0, 0, 0], 4, -6),
    ],
)
def test_who_accepts(own: int, others: list[float], waiting: int, room: int) -> None:
    count = 1 + len(others)
    counts = ConnectionCounts(numbers(own, *others), numbers(*[0] * count), 0, lambda: 0)
    assert max(counts.room(own, lambda: waiting), 0) == max(room, 0)


def test_a_silent_process_is_not_waited_for() -> None:
    alive = numbers(0.0, 10.0)
    counts = ConnectionCounts(numbers(4.0, 0.0), alive, 0, lambda: 10.0 + SILENT_S / 2)
    assert counts.room(4, lambda: 1) <= 0
    alive[1] -= SILENT_S
    assert counts.room(4, lambda: 1) == 1


def test_connections_of_a_server_are_spread_from_its_start() -> None:
    with live(*STAND_IN, "--workers", "3", constants=EVEN, ready=False) as server:

        def waits() -> bool:
            response = server.try_get("/readyz")
            return response is not None and response.status_code == 503 and "HTTP processes" in response.text

        # It is ready once each process accepts connections, or the first one would keep all that clients open then.
        until(lambda: len(server.http_pids) == 3, what="all processes")
        late = server.http_pids[2]
        os.kill(late, signal.SIGSTOP)
        try:
            until(waits, what="a process that waits for another one")
        finally:
            os.kill(late, signal.SIGCONT)
        server.wait_ready()
        server.wait_announced()

        with contextlib.ExitStack() as stack:
            for _ in range(8):  # one after the other
                sock = stack.enter_context(connect(server))
                sock.sendall(GET)
                assert sock.recv(4096).startswith(b"HTTP/1.1 200")
            assert sorted(connection_counts(server)) == [2, 3, 3]
            for _ in range(41):  # all at once
                stack.enter_context(connect(server))
            until(lambda: sum(connection_counts(server)) == 49, what="all connections")
            assert sorted(connection_counts(server)) == [16, 16, 17]
        until(lambda: connection_counts(server) == [0, 0, 0], what="their end")

        # None waits for a process that is stopped or gone.
        first, second, _ = map(psutil.Process, server.http_pids)
        first.suspend()
        until(lambda: first.status() == psutil.STATUS_STOPPED, what="a stopped process")
        for _ in range(12):
            assert server.get("/livez").status_code == 200
        os.kill(second.pid, signal.SIGKILL)
        for _ in range(12):
            assert server.get("/livez").status_code == 200
        first.resume()
        until(lambda: server.log.count("is ready again") == 1, what="the return of the killed process")
