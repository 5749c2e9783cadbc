"""An HTTP process holds a limited number of bytes for its clients, which is checked before the work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from embert.server.http import connections
from embert.server.http.connections import LEAST_TAKEN, LEAST_TAKEN_PER_S, Connection, end_slow_readers
from embert.server.http.errors import PayloadTooLarge, Unavailable
from embert.server.http.held_bytes import SMALL_BYTES, HeldBytes
from tests.server.connections import LINGERS, connect, head
from tests.server.http.echo_server import GET, GET_LARGE, LARGE, Serving, post, scene, wait_until
from tests.server.live import PATIENT, STAND_IN, Live, live, until
from tests.server.stand_in import HELD

MB = 1_000_000


def test_large_requests_leave_a_quarter_for_small_ones() -> None:
    held = HeldBytes(10 * MB)
    held.requests, held.unread = 4 * MB, 5 * MB
    held.check(MB, "it")
    held.check(2 * MB, "it", counted=MB)
    with pytest.raises(Unavailable, match=f"{MB + 1} .*{9 * MB}.*{10 * MB}") as refused:
        held.check(MB + 1, "it")
    assert refused.value.retry_after_s
    held.requests += 3 * MB
    held.check(SMALL_BYTES, "it")
    assert not held.is_full
    held.requests += MB // 2
    with pytest.raises(Unavailable):
        held.check(SMALL_BYTES, "it")
    held.requests += 1
    assert held.is_full
    with pytest.raises(PayloadTooLarge, match=f"{10 * MB + 1} .*{10 * MB}"):
        held.check(10 * MB + 1, "it", "inputs")


@scene()
async def test_unread_responses_are_counted_until_they_are_read(server: Serving) -> None:
    clients = [await server.connect() for _ in range(3)]
    for client in clients:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(GET_LARGE + GET)
    await wait_until(lambda: server.held.unread >= 3 * len(LARGE))  # all of each response, also what is in the kernel
    assert server.held.unread < 3 * len(LARGE) + 10_000
    clients[0].writer.transport.abort()
    await server.count(2)
    for client in clients[1:]:
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert (await client.response()).body == LARGE
        assert await client.is_open()
    for connection in server.connections:
        connection.count_unread()
    assert server.held.unread == 0


@scene(held=400_000)
async def test_requests_that_wait_for_earlier_responses_are_counted(server: Serving) -> None:
    clients = [await server.connect() for _ in range(2)]
    for client in clients:
        await client.send(post(b"a", "/slow"))
    await wait_until(lambda: len(server.asked) == 2)
    held: list[int] = []
    for client in clients:
        await client.send(post(b"b") + post(b"c" * 230_000))
        await wait_until(lambda: server.held.unread != sum(held))
        held.append(server.held.unread - sum(held))
    assert all(10_000 < size < 300_000 for size in held)
    server.held.requests = 500_000 - server.held.unread + 1  # others hold the rest
    client = await server.connect()
    await client.send(post(b"a", "/slow"))
    await wait_until(lambda: len(server.asked) == 3)
    await client.send(post(b"b") + post(b"c" * 100_000))
    await wait_until(lambda: server.held.is_full)
    server.going.set()
    server.held.requests = 0
    responses = await client.rest()
    assert responses[-1].status == 503
    assert "--max-held-bytes" in responses[-1].error
    for other in clients:
        assert [(await other.response()).status for _ in range(3)] == [200] * 3


@dataclass(eq=False)
class Reader:
    """A connection whose client reads `rate` bytes a second."""

    rate: int
    size: int = 50 * MB
    transport: Any = None

    def __post_init__(self) -> None:
        self.transport = self
        self.aborted = False

    def count_unread(self) -> None: ...

    def shutdown(self) -> None: ...

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("scarce", [False, True])
def test_clients_must_read_faster_where_memory_is_scarce(scarce: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 KiB in --client-timeout otherwise, so that a few of them could keep others out for hours."""
    held = HeldBytes(100 * MB)
    held.unread = 51 * MB if scarce else 50 * MB
    least, least_scarce = LEAST_TAKEN // 30, LEAST_TAKEN_PER_S  # bytes a second
    rates = [0, least - 50, least + 50, least_scarce - 2000, least_scarce + 2000, 50_000]
    readers = [Reader(rate) for rate in rates]
    now, ended = 0.0, 0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 200:
            raise asyncio.CancelledError
        for reader in readers:
            reader.size -= int(reader.rate * seconds)

    def on_end() -> None:
        nonlocal ended
        ended += 1

    monkeypatch.setattr(connections, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(connections, "unread_bytes", lambda connection: 0 if connection.aborted else connection.size)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(end_slow_readers(cast("list[Connection]", readers), held, 30.0, on_end))
    cut = [reader.rate for reader in readers if reader.aborted]
    assert cut == (rates[:4] if scarce else rates[:2])
    assert ended == len(cut)


# --- a server ---

TEXTS = json.dumps({"inputs": [[101, number, 102] for number in range(1000, 3000)]}).encode()  # 12.3 MB of response
REFUSED = 'embert_rejected_total{reason="memory"}'


@pytest.fixture(scope="module")
def narrow() -> Iterator[Live]:
    options = ("--payload-limit", "4000000", "--max-held-bytes", "32000000", "--max-batch-tokens", "8192")
    with live(*STAND_IN, *options, "--client-timeout", "300", env=PATIENT, constants=LINGERS) as server:
        yield server


def serves_small_requests(server: Live) -> bool:
    return server.post("/embed", {"inputs": [101, 7592, 102]}).status_code == 200


def test_unread_responses_have_a_limit(narrow: Live) -> None:
    before = narrow.metrics()
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", narrow.ports[0]))
            sock.sendall(head(len(TEXTS)) + TEXTS)
        until(lambda: narrow.metrics()[REFUSED] >= before[REFUSED] + 4, what="the refusal of the others")
        until(lambda: narrow.metrics()["embert_requests_in_flight"] == 1, what="the end of the work")
        metrics = narrow.metrics()
        ran = metrics["embert_batch_texts_sum"] - before["embert_batch_texts_sum"]
        assert ran <= 8000 + 100  # the refused ones did not run; idle engines do, on a text each
        assert 4e6 < metrics["embert_held_bytes"] < 40e6
        assert serves_small_requests(narrow)
    until(lambda: narrow.metrics()["embert_held_bytes"] < 1e6, what="free memory")
    assert narrow.post("/embed", json.loads(TEXTS)).status_code == 200


def test_bodies_of_queued_requests_have_a_limit(narrow: Live) -> None:
    before = narrow.metrics()[REFUSED]
    body = json.dumps({"inputs": "word " * 780_000}).encode()
    with ThreadPoolExecutor(1) as pool, narrow.held(), contextlib.ExitStack() as stack:
        blocking = pool.submit(narrow.post, "/embed", {"inputs": [[101, HELD, 102]]})
        until(lambda: narrow.metrics()["embert_admitted_tokens"] > 0, what="the blocking request")
        for _ in range(12):
            sock = stack.enter_context(connect(narrow))
            sock.sendall(head(len(body)) + body)
        until(lambda: narrow.metrics()[REFUSED] == before + 4, what="the refusal of the others")
        until(lambda: narrow.metrics()["embert_requests_in_flight"] == 10, what="the others' wait")
        assert 31e6 < narrow.metrics()["embert_held_bytes"] < 32e6
    assert blocking.result().status_code == 200
    until(lambda: narrow.metrics()["embert_held_bytes"] < 1e6, what="free memory")


def test_unfinished_bodies_have_a_limit(narrow: Live) -> None:
    (pid,) = narrow.http_pids
    large = b"x" * 3_900_000
    before, rss = narrow.metrics()[REFUSED], psutil.Process(pid).memory_info().rss
    with contextlib.ExitStack() as stack:
        most = 0
        for _ in range(60):
            sock = stack.enter_context(connect(narrow))
            with contextlib.suppress(ConnectionError):  # refused
                sock.sendall(head(len(large) + 1) + large)
            most = max(most, psutil.Process(pid).memory_info().rss)
        assert most - rss < 120e6  # 32 MB of bodies; all of them would be 234 MB
        until(lambda: narrow.metrics()[REFUSED] >= before + 52, what="the refusal of the others")
        assert serves_small_requests(narrow)
        response = narrow.post("/v1/embeddings", {"input": large.decode()})
        assert (response.status_code, response.headers["retry-after"], response.headers["connection"]) == (
            503,
            "1",
            "close",
        )
        assert "--max-held-bytes" in response.json()["error"]["message"]
    until(lambda: narrow.post("/embed", {"inputs": large.decode()}).status_code == 200, what="free memory")
