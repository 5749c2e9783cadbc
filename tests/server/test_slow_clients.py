"""Clients that are slow, silent, half gone or many: they get what they deserve, and others do not notice."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.connections import connect, head, read_all
from tests.server.live import STAND_IN, Live, live, until
from tests.server.stand_in import SLEEP

GOOD = json.dumps({"inputs": [101, 7592, 102]}).encode()
PATIENCE_S = 1.0


@pytest.fixture(scope="module")
def impatient() -> Iterator[Live]:
    options = ("--client-timeout", str(PATIENCE_S), "--request-timeout", "4", "--max-batch-tokens", "256")
    with live(*STAND_IN, *options) as server:
        yield server


@pytest.fixture(autouse=True)
def _others_do_not_notice(impatient: Live) -> Iterator[None]:
    yield
    assert impatient.post("/embed", {"inputs": [101, 7592, 102]}).status_code == 200
    until(lambda: impatient.metrics()["embert_requests_in_flight"] == 1, what="the end of all requests")


@pytest.mark.parametrize("sent", [0, 10], ids=["nothing", "a part"])
@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings", "/tokenize"])
def test_a_body_that_does_not_come_is_408(impatient: Live, path: str, sent: int) -> None:
    before = impatient.metrics().get(f'embert_requests_total{{route="{path}",status="408"}}', 0)
    with connect(impatient) as sock:
        began = time.monotonic()
        sock.sendall(head(len(GOOD), path) + GOOD[:sent])
        answer = read_all(sock)  # until the server closes
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"did not arrive in time (--client-timeout)" in answer
        assert b"\r\nconnection: close\r\n" in answer
        assert time.monotonic() - began > PATIENCE_S * 0.9
    assert impatient.metrics()[f'embert_requests_total{{route="{path}",status="408"}}'] == before + 1


def test_a_body_in_pieces_is_read(impatient: Live) -> None:
    with connect(impatient) as sock:
        sock.sendall(head(len(GOOD)))
        for start in range(0, len(GOOD), 9):
            time.sleep(PATIENCE_S / 3)
            sock.sendall(GOOD[start : start + 9])
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_trickles_for_ever_ends_with_the_requests_time(impatient: Live) -> None:
    with connect(impatient) as sock:
        began = time.monotonic()
        sock.sendall(head(1_000_000))
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 10:
                sock.sendall(b" ")
                time.sleep(PATIENCE_S / 4)
                if time.monotonic() - began > 6:
                    break
        assert read_all(sock).startswith(b"HTTP/1.1 408 ")


def test_an_answer_that_is_not_taken_is_cut_off(impatient: Live) -> None:
    texts = json.dumps({"inputs": [[101, number, 102] for number in range(1000, 3000)]}).encode()  # 8 MB of vectors
    before = impatient.metrics()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", impatient.ports[0]))
        sock.sendall(head(len(texts)) + texts)
        until(lambda: impatient.metrics()["embert_unread_answers_total"] > before["embert_unread_answers_total"])
        # It had its place in the queue only until it was computed.
        assert impatient.metrics()["embert_admitted_tokens"] == 0


def test_an_answer_that_is_taken_slowly_is_not_cut_off(impatient: Live) -> None:
    texts = json.dumps({"inputs": [[101, number, 102] for number in range(1000, 3000)]}).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.settimeout(20)
        sock.connect(("127.0.0.1", impatient.ports[0]))
        sock.sendall(head(len(texts)) + texts)
        received, length = b"", -1
        while length < 0 or len(received) < length:
            piece = sock.recv(1_000_000)
            assert piece, "the connection was closed"
            received += piece
            if length < 0 and b"\r\n\r\n" in received:
                front, _, _ = received.partition(b"\r\n\r\n")
                (size,) = [line for line in front.split(b"\r\n") if line.lower().startswith(b"content-length:")]
                length = len(front) + 4 + int(size.split(b":")[1])
            if len(received) % 7 == 0:
                time.sleep(PATIENCE_S / 5)
        assert len(json.loads(received.partition(b"\r\n\r\n")[2])) == 2000


def test_a_client_that_closes_its_sending_side_has_left(impatient: Live) -> None:
    queued = 'embert_cancelled_texts_total{stage="queued"}'
    before = impatient.metrics()[queued]
    with ThreadPoolExecutor(1) as pool:
        blocking = pool.submit(impatient.post, "/embed", {"inputs": [[101, SLEEP + 25, 102]]})
        until(lambda: impatient.metrics()["embert_admitted_tokens"] == 3, what="the blocking request")
        with connect(impatient) as sock:
            sock.sendall(head(len(GOOD)) + GOOD)
            until(lambda: impatient.metrics()["embert_admitted_tokens"] == 6, what="the request")
            sock.shutdown(socket.SHUT_WR)
            until(lambda: impatient.metrics()[queued] == before + 1, what="the cancellation")
            assert not blocking.done()
        assert blocking.result().status_code == 200


def test_a_connection_that_is_reset_has_left(impatient: Live) -> None:
    queued = 'embert_cancelled_texts_total{stage="queued"}'
    before = impatient.metrics()[queued]
    with ThreadPoolExecutor(1) as pool:
        blocking = pool.submit(impatient.post, "/embed", {"inputs": [[101, SLEEP + 25, 102]]})
        until(lambda: impatient.metrics()["embert_admitted_tokens"] == 3, what="the blocking request")
        with connect(impatient) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close means reset
            sock.sendall(head(len(GOOD)) + GOOD)
            until(lambda: impatient.metrics()["embert_admitted_tokens"] == 6, what="the request")
        until(lambda: impatient.metrics()[queued] == before + 1, what="the cancellation")
        assert blocking.result().status_code == 200


def test_a_thousand_idle_connections_keep_nobody_out(impatient: Live) -> None:
    """tests/soak has ten thousand."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(connect(impatient))
        for _ in range(5):
            assert impatient.post("/embed", {"inputs": [101, 7592, 102]}).status_code == 200
