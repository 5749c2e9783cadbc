"""Clients that are slow, silent or gone: each is served or cut off in time, and others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from embert.server.http import held_bytes
from embert.server.http.errors import RequestError
from embert.server.http.held_bytes import BodyReader, HeldBytes
from tests.server.connections import LINGERS, connect, head, read_all
from tests.server.http.echo_server import Serving, scene, skip
from tests.server.live import PATIENT, STAND_IN, Live, live, until
from tests.server.stand_in import HELD

GOOD = json.dumps({"inputs": [101, 7592, 102]}).encode()
CLIENT_TIMEOUT_S, REQUEST_TIMEOUT_S = 30.0, 100.0


@pytest.mark.parametrize(
    ("pieces", "gap_s", "named"),
    [(4, 20.0, ""), (4, CLIENT_TIMEOUT_S + 2, "--client-timeout"), (40, 20.0, "--request-timeout")],
)
@scene()
async def test_a_body_has_a_time_for_each_piece_and_for_all(
    server: Serving, monkeypatch: pytest.MonkeyPatch, pieces: int, gap_s: float, named: str
) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(held_bytes, "time", SimpleNamespace(monotonic=loop.time))
    reader = BodyReader(10_000, server.held, CLIENT_TIMEOUT_S)
    watch = loop.create_task(reader.watch())
    left = iter(range(pieces - 1, -1, -1))

    async def receive() -> dict[str, Any]:
        await skip(gap_s)
        for _ in range(3):
            await asyncio.sleep(0)  # for `watch`
        return {"type": "http.request", "body": b"ab", "more_body": next(left) > 0}

    read = reader.read([], receive, loop.time() + REQUEST_TIMEOUT_S, "--request-timeout")
    if named:
        with pytest.raises(RequestError, match=named):
            await read
    else:
        assert await read == b"ab" * pieces
    assert server.held.requests == (0 if named else 2 * pieces)
    watch.cancel()


def test_a_body_in_small_pieces_takes_no_more_memory_than_a_large_one() -> None:
    pieces, size = 20_000, 40_000
    left = iter(range(pieces - 1, -1, -1))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": bytes(bytearray(2)), "more_body": next(left) > 0}

    held = HeldBytes(8 * size)
    tracemalloc.start()
    body = asyncio.run(BodyReader(size, held, 30).read([], receive, time.monotonic() + 3600, "a header"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(body) == size
    assert peak < 8 * size  # 40 times where every piece is kept
    assert held.total == size  # until the response is sent


# --- a server ---


@pytest.fixture(scope="module")
def running() -> Iterator[Live]:
    options = ("--client-timeout", "4", "--max-batch-tokens", "256")
    with live(*STAND_IN, *options, env=PATIENT, constants=LINGERS) as server:
        yield server


@pytest.fixture
def impatient(running: Live) -> Iterator[Live]:
    """After the test, others are served and nothing of it is left."""
    yield running
    assert running.post("/embed", {"inputs": [101, 7592, 102]}).status_code == 200
    until(lambda: running.metrics()["embert_requests_in_flight"] == 1, what="the end of all requests")


@pytest.mark.parametrize(("path", "sent"), [("/embed", 10), ("/v1/embeddings", 0), ("/tokenize", 0)])
def test_a_body_that_does_not_come_is_408(impatient: Live, path: str, sent: int) -> None:
    counted = f'embert_requests_total{{route="{path}",status="408"}}'
    with connect(impatient) as sock:
        sock.sendall(head(len(GOOD), path) + GOOD[:sent])
        response = read_all(sock)  # until the server closes
    assert response.startswith(b"HTTP/1.1 408 ")
    assert b"--client-timeout" in response
    assert b"\r\nconnection: close\r\n" in response
    assert impatient.metrics()[counted] == 1


def test_a_response_that_is_not_read_is_cut_off(impatient: Live) -> None:
    texts = json.dumps({"inputs": [[101, number, 102] for number in range(1000, 3000)]}).encode()  # 8 MB of vectors
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", impatient.ports[0]))
        sock.sendall(head(len(texts)) + texts)
        until(lambda: impatient.metrics()["embert_unread_answers_total"] == 1)
        # It had its place in the queue only until it was computed.
        assert impatient.metrics()["embert_admitted_tokens"] == 0


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


@pytest.mark.parametrize(("path", "status"), [("/v1/embeddings", 413), ("/nothing", 404)])
def test_a_client_that_sends_everything_first_reads_an_early_response(impatient: Live, path: str, status: int) -> None:
    request = urllib.request.Request(impatient.url + path, bytes(30_000_000), method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    with refused.value:
        assert refused.value.code == status
        assert b"error" in refused.value.read()


def test_few_files_and_idle_connections_leave_others_served() -> None:
    options = ("--max-connections", "40")
    with live(*STAND_IN, *options, files=400, constants=LINGERS) as server, contextlib.ExitStack() as stack:
        for sent in (b"", b"\r\n", head(100_000, "/nosuch") + b"a", b"POST /embed HTTP/1.1\r\n"):
            for _ in range(110):
                sock = stack.enter_context(connect(server))
                with contextlib.suppress(ConnectionError):
                    sock.sendall(sent)
            if sent.endswith(b"\n") and sent.strip():  # heads that have begun have their time, and others are refused
                assert server.get("/livez").status_code == 200
            else:
                assert server.post("/embed", {"inputs": [101, 7592, 102]}).status_code == 200
