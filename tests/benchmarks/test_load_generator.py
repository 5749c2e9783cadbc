"""The load generator: it counts what came back, and a server that stalls cannot hide it."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from benchmarks.lib.load_plan import LOST, Plan, Responses, post
from benchmarks.lib.load_worker import run

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
REQUESTS = tuple(post("/embed", {"inputs": str(i)}, kind="query", texts=1, tokens=3) for i in range(7))


@contextmanager
def responding(response: Callable[[int], bytes]) -> Iterator[int]:
    """A server that responds to its n-th request with `response(n)`; empty bytes hang up."""
    numbers = iter(range(10**9))

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while head := self.rfile.readline():
                length = 0
                while (line := self.rfile.readline()) not in (b"\r\n", b""):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                assert head.startswith(b"POST /embed")
                self.rfile.read(length)
                if not (content := response(next(numbers))):
                    return
                self.wfile.write(content)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, request: object, client_address: object) -> None:
            """The load hangs up when it is done; this is not an error."""

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()


def load(port: int, connections: int = 4, window_s: float = 0.5, rate: float | None = None) -> Responses:
    return run(Plan(port, REQUESTS, connections, window_s, settle_s=0.1, rate=rate), time.monotonic() + 0.1)


def test_closed_loop_sends_the_next_request_after_a_response() -> None:
    def slow(number: int) -> bytes:
        time.sleep(0.02)
        return OK

    with responding(slow) as port:
        responses = load(port)
    assert set(responses.status.tolist()) == {200}
    assert (responses.ended - responses.due).min() >= 0.02
    # Of four connections none sends before an earlier response has come.
    assert (np.sort(responses.due)[4:] >= np.sort(responses.ended)[:-4]).all()


def test_open_loop_sends_at_the_rate_that_is_due() -> None:
    with responding(lambda number: OK) as port:
        responses = load(port, window_s=1.0, rate=300.0)
    # Poisson: more than four standard deviations, however many a busy machine had time for.
    assert np.diff(np.sort(responses.due)).mean() == pytest.approx(1 / 300, rel=4.5 / len(responses.due) ** 0.5)
    assert set(responses.status.tolist()) == {200}


def test_open_loop_latency_runs_from_the_moment_due() -> None:
    """One stall of 0.4 s delays all that was due in it; a generator that waited would see one slow response."""
    lock = threading.Lock()

    def stalling(number: int) -> bytes:
        with lock:
            if number == 30:
                time.sleep(0.4)
        return OK

    with responding(stalling) as port:
        responses = load(port, window_s=1.0, rate=100.0)
    late = responses.ended - responses.due > 0.05
    assert late.sum() >= 15


def test_broken_connection_is_counted_and_replaced() -> None:
    with responding(lambda number: b"" if number == 0 else OK) as port:
        responses = load(port, connections=1, window_s=1.0, rate=20.0)
    assert (responses.status == LOST).sum() == 1
    assert (responses.status == 200).sum() == len(responses.status) - 1 > 0
    assert np.isfinite(responses.ended).all()
