"""Floods, clients that disconnect, and bytes that are not HTTP: others are served, and the queue stays bounded."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.server.connections import send
from tests.server.crowd import PATIENCE_S, Crowd, post
from tests.server.live import STAND_IN, Live, live, until
from tests.server.stand_in import expected


@pytest.fixture(scope="module")
def narrow() -> Iterator[Live]:
    """With a queue that is soon full."""
    options = ("--max-queue-tokens", "64", "--max-batch-tokens", "256")
    with live(*STAND_IN, *options, env={"STAND_IN_S": "0.02"}) as server:
        yield server


def test_clients_that_leave_free_the_queue(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    with live(*STAND_IN, "--max-batch-tokens", "256", env={"STAND_IN_HOLD_FILE": str(hold)}) as server:
        answers: list[httpx.Response] = []
        hold.touch()
        running = post(server, [[101, 7592, 102]], answers)
        until(lambda: server.metrics()["embert_admitted_tokens"] == 3, what="the request in flight")
        until(lambda: server.metrics()["embert_queue_texts"] == 0, what="its batch")
        leaving = [send(server, {"inputs": [[101, 7, 102]] * 8}) for _ in range(5)]
        until(lambda: server.metrics()["embert_queue_texts"] == 40, what="their texts in the queue")
        for sock in leaving:
            sock.close()
        cancelled = 'embert_cancelled_texts_total{stage="queued"}'
        until(lambda: server.metrics()[cancelled] == 40, what="all their texts to be dropped")
        assert server.metrics()["embert_queue_texts"] == 0
        hold.unlink()
        running.join(PATIENCE_S)
        assert [answer.status_code for answer in answers] == [200]


def test_a_flood_gets_200_or_429_and_the_queue_stays_bounded(narrow: Live) -> None:
    server = narrow
    refused = 'embert_rejected_total{reason="queue_full"}'
    before = server.metrics()[refused]
    with Crowd(server, clients=48) as crowd:
        crowd.wait_for(100)
        crowd.wait_for(50, "429")
        assert server.metrics()["embert_queue_tokens"] <= 64
        assert server.get("/health").status_code == 200
    assert set(crowd.answers) == {"200", "429"}
    metrics = server.metrics()
    assert metrics[refused] == before + crowd.answers["429"]
    assert metrics["embert_queue_tokens"] == metrics["embert_queue_texts"] == 0


def test_a_request_larger_than_the_queue_is_taken_when_nothing_waits(narrow: Live) -> None:
    server = narrow
    batches = 'embert_batches_total{engine="0"}'
    before = server.metrics()[batches]
    answer = server.post("/embed", {"inputs": [[101, index, 102] for index in range(1000, 1500)]})
    assert answer.status_code == 200
    wanted = np.stack([expected([101, index, 102]) for index in range(1000, 1500)])
    np.testing.assert_allclose(np.array(answer.json()), wanted, atol=1e-5)
    until(lambda: server.metrics()[batches] >= before + 1500 / 256, what="its batches in the metrics")


def _raw(data: bytes, *, half_close: bool = False) -> Callable[[Live], bytes]:
    def send(server: Live) -> bytes:
        with socket.create_connection(("127.0.0.1", server.ports[0]), timeout=60) as sock:
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
            try:
                return sock.recv(65536)
            except (TimeoutError, ConnectionResetError):
                return b""

    return send


@pytest.mark.parametrize(
    ("data", "half_close", "starts"),
    [
        (b"\x16\x03\x01 this is TLS", False, b"HTTP/1.1 400"),
        (b"GET / HTTP/9.9\r\n\r\n", False, b"HTTP/1.1 400"),
        (b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n", False, b"HTTP/1.1 400"),
        (b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{", True, b""),
        (b"", True, b""),
    ],
)
def test_bytes_that_are_not_http_hurt_nobody(server: Live, data: bytes, half_close: bool, starts: bytes) -> None:
    assert _raw(data, half_close=half_close)(server).startswith(starts)
    assert server.get("/readyz").status_code == 200


def test_idle_connections_keep_nobody_out(server: Live) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.ports[0]), timeout=60) for _ in range(300)]
    try:
        assert server.post("/embed", {"inputs": "still there?"}).status_code == 200
    finally:
        for sock in idle:
            sock.close()
