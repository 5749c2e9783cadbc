"""Clients that are slow, silent, half closed or many: each is answered or cut off in time; others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import time
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from embert.server.http.connections import unread_bytes
from embert.server.http.held_bytes import BodyReader, HeldBytes
from tests.server.connections import connect, head, read_all
from tests.server.http.echo_server import play, serving
from tests.server.live import STAND_IN, Live, live, until
from tests.server.stand_in import HELD

GOOD = json.dumps({"inputs": [101, 7592, 102]}).encode()
PATIENCE_S = 1.0


@pytest.fixture(scope="module")
def impatient() -> Iterator[Live]:
    options = ("--client-timeout", str(PATIENCE_S), "--request-timeout", "8", "--max-batch-tokens", "256")
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
        for start in range(0, len(GOOD), 2):
            time.sleep(PATIENCE_S / 10)
            sock.sendall(GOOD[start : start + 2])
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_trickles_for_ever_ends_with_the_requests_time(impatient: Live) -> None:
    with connect(impatient) as sock:
        sock.sendall(head(1_000_000))
        sock.settimeout(PATIENCE_S / 4)
        answer = b""
        while not answer:
            sock.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                answer = sock.recv(65536)
        while part := sock.recv(65536):  # the body may come apart from the head
            answer += part
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"did not arrive in time (--request-timeout)" in answer


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


def test_reading_shows_although_the_kernel_buffers() -> None:
    """The transport's own number stands still until a third of the kernel's buffer, megabytes, is empty."""

    async def scene() -> None:
        async with serving() as server:
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
                sock.connect(("127.0.0.1", server.port))
                sock.sendall(b"GET /large HTTP/1.1\r\nhost: h\r\n\r\n")
                await server.count(1)
                (connection,) = server.connections
                while not (unread := unread_bytes(connection)):
                    await asyncio.sleep(0.002)
                held = connection.transport.get_write_buffer_size()
                await asyncio.sleep(0.05)
                unread = unread_bytes(connection)
                for _ in range(20):
                    sock.recv(16_384)
                    await asyncio.sleep(0.01)
                assert connection.transport.get_write_buffer_size() == held
                assert unread_bytes(connection) < unread - 100_000
            await server.count(0)

    play(scene)


def shut_down(sock: socket.socket) -> None:
    """Nothing more will be sent."""
    sock.shutdown(socket.SHUT_WR)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()


@pytest.mark.parametrize("leave", [shut_down, reset])
def test_a_client_that_closes_its_side_has_left(impatient: Live, leave: Callable[[socket.socket], None]) -> None:
    queued = 'embert_cancelled_texts_total{stage="queued"}'
    before = impatient.metrics()[queued]
    with ThreadPoolExecutor(1) as pool:
        with impatient.held():
            blocking = pool.submit(impatient.post, "/embed", {"inputs": [[101, HELD, 102]]})
            until(lambda: impatient.metrics()["embert_admitted_tokens"] == 3, what="the blocking request")
            with connect(impatient) as sock:
                sock.sendall(head(len(GOOD)) + GOOD)
                until(lambda: impatient.metrics()["embert_admitted_tokens"] == 6, what="the request")
                leave(sock)
                until(lambda: impatient.metrics()[queued] == before + 1, what="the cancellation")
        assert blocking.result().status_code == 200


LARGE = b"x" * 3_900_000


def test_unfinished_bodies_have_a_budget_together(patient: Live) -> None:
    server = patient
    (pid,) = server.api_pids
    before, rss = server.metrics(), psutil.Process(pid).memory_info().rss
    refused = 'embert_rejected_total{reason="memory"}'
    with contextlib.ExitStack() as stack:
        most = 0
        for _ in range(60):
            sock = stack.enter_context(connect(server))
            sock.sendall(head(len(LARGE) + 1) + LARGE)
            most = max(most, psutil.Process(pid).memory_info().rss)
        assert most - rss < 120e6  # 32 MB of bodies; all of them would be 234 MB
        until(lambda: server.metrics()[refused] >= before[refused] + 52, what="the refusal of the others")
        assert server.post("/embed", {"inputs": [101, 7592, 102]}).status_code == 200  # small ones go on
        answer = server.post("/v1/embeddings", {"input": "x" * 3_900_000})
        assert (answer.status_code, answer.headers["retry-after"], answer.headers["connection"]) == (503, "1", "close")
        assert "(--max-held-bytes)" in answer.json()["error"]["message"]
    # What they held is free again, and memory with it.
    until(lambda: server.post("/embed", {"inputs": "x" * 3_900_000}).status_code == 200, what="room again")


@pytest.fixture
def patient() -> Iterator[Live]:
    """With time to see what waits, and one HTTP process."""
    options = (
        "--max-batch-tokens",
        "256",
        "--workers",
        "1",
        "--payload-limit",
        "4000000",
        "--max-held-bytes",
        "32000000",
    )
    with live(*STAND_IN, *options) as server:
        yield server


def test_a_body_in_small_pieces_takes_no_more_memory_than_a_large_one() -> None:
    pieces, size = 100_000, 200_000
    left = iter(range(pieces - 1, -1, -1))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": bytes(bytearray(2)), "more_body": next(left) > 0}

    held = HeldBytes(8 * size)
    reader = BodyReader(size, held, 30)
    tracemalloc.start()
    body = asyncio.run(reader.read([], receive, time.monotonic() + 3600, "a header"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(body) == size
    assert peak < 8 * size  # 40 times where every piece is kept
    assert held.total == size  # until its request is answered


@pytest.mark.parametrize(
    ("path", "status"), [("/embed", 413), ("/v1/embeddings", 413), ("/nothing", 404), ("/health", 405)]
)
def test_a_client_that_sends_everything_first_reads_an_early_answer(impatient: Live, path: str, status: int) -> None:
    for _ in range(5):
        asks = urllib.request.Request(impatient.url + path, bytes(30_000_000), method="POST")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asks, timeout=60)
        with refused.value:
            assert refused.value.code == status
            assert b"error" in refused.value.read()


def test_few_files_and_idle_connections_keep_nobody_out() -> None:
    with live(*STAND_IN, "--max-connections", "40", files=400) as server, contextlib.ExitStack() as stack:
        for sent in (b"", b"\r\n", head(100_000, "/nosuch") + b"a", b"POST /embed HTTP/1.1\r\n"):
            for _ in range(110):
                sock = stack.enter_context(connect(server))
                with contextlib.suppress(ConnectionError):
                    sock.sendall(sent)
            if sent.endswith(b"\n") and sent.strip():  # heads that have begun have their time, and others are refused
                assert server.get("/livez").status_code == 200
            else:
                assert server.post("/embed", {"inputs": [101, 7592, 102]}).status_code == 200


def test_a_thousand_idle_connections_keep_nobody_out(impatient: Live) -> None:
    """tests/soak has ten thousand."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(connect(impatient))
        for _ in range(5):
            assert impatient.post("/embed", {"inputs": [101, 7592, 102]}).status_code == 200
