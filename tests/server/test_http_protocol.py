"""What is before a request: the size, the time and the number of connections. Real sockets, one process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from server import http_protocol
from server.http_protocol import bounded_protocol
from tests.server.live import STAND_IN, live, until

LIMIT = 4096
GET = b"GET /livez HTTP/1.1\r\nhost: h\r\n\r\n"
Counted = list[tuple[str, int]]
Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the size of the body, after a moment; and says whether the connection is one too many."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    await asyncio.sleep(0.05)
    body = b"%d %d" % (size, "too_many_connections" in scope["state"])
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(connections: int = 100) -> AsyncIterator[tuple[Callable[[], Awaitable[Opened]], Counted]]:
    counted: Counted = []
    protocol = bounded_protocol(LIMIT, connections, lambda route, status: counted.append((route, status)))
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None)
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()
    listening = await loop.create_server(
        lambda: protocol(config=config, server_state=state, app_state={}, _loop=loop),  # type: ignore[call-arg]
        "127.0.0.1",
    )
    port = listening.sockets[0].getsockname()[1]
    opened: list[asyncio.StreamWriter] = []

    async def connect() -> Opened:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        opened.append(writer)
        await asyncio.sleep(0.01)  # until the server has seen it too
        return reader, writer

    try:
        yield connect, counted
    finally:
        for writer in opened:
            writer.close()
        listening.close()


async def answer(opened: Opened, *sent: bytes) -> tuple[int, bytes, bytes]:
    """Status, head and body of one answer; status 0 when the connection was closed instead."""
    reader, writer = opened
    for piece in sent:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.01)
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0, b"", b""
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    return int(head.split()[1]), head, await reader.readexactly(length)


async def closed(opened: Opened) -> bool:
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(opened[0].read(), 5) == b""
    return True


def head_of(size: int) -> bytes:
    start, end = b"POST /embed HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\nx-filler: ", b"\r\n\r\n"
    return start + b"x" * (size - len(start) - len(end)) + end


@pytest.mark.parametrize("piece", [1 << 20, 1000])
def test_a_head_has_a_size_in_one_piece_or_many(piece: int) -> None:
    async def scene() -> None:
        async with serving() as (connect, counted):
            fits, over = head_of(LIMIT - 20) + b"12345", head_of(LIMIT + 200) + b"12345"
            opened = await connect()
            for _ in range(2):  # the connection stays good
                status, _, body = await answer(opened, *(fits[i : i + piece] for i in range(0, len(fits), piece)))
                assert (status, body) == (200, b"5 0")
            opened = await connect()
            status, head, body = await answer(opened, *(over[i : i + piece] for i in range(0, len(over), piece)))
            assert status == 431
            assert b"connection: close" in head
            assert json.loads(body)["error_type"] == "Validation"
            assert f"{LIMIT} bytes" in json.loads(body)["error"]
            assert await closed(opened)
            assert counted == [("other", 431)]

    asyncio.run(scene())


def test_a_head_that_never_ends_is_not_kept() -> None:
    async def scene() -> None:
        async with serving() as (connect, counted):
            status, _, _ = await answer(await connect(), b"GET / HTTP/1.1\r\nx: ", *[b"x" * 1000] * 5)
            assert status == 431
            status, _, _ = await answer(await connect(), b"GET /" + b"x" * 100_000)
            assert status == 431
            assert counted == [("other", 431)] * 2

    asyncio.run(scene())


def test_a_large_body_is_not_a_large_head() -> None:
    async def scene() -> None:
        async with serving() as (connect, counted):
            request = b"POST /embed HTTP/1.1\r\ncontent-length: 50000\r\n\r\n" + b"x" * 50_000
            opened = await connect()
            for _ in range(2):
                assert (await answer(opened, request))[2] == b"50000 0"
            assert not counted

    asyncio.run(scene())


def test_a_slow_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.3)

    async def scene() -> None:
        async with serving() as (connect, counted):
            status, _, body = await answer(await connect(), b"GET / HTTP/1.1\r\nhost:")
            assert status == 408
            assert "0.3 s" in json.loads(body)["error"]
            quick = await connect()
            assert (await answer(quick, GET[:20], GET[20:]))[0] == 200
            await asyncio.sleep(0.5)  # the time was the head's, not the connection's
            assert (await answer(quick, GET))[0] == 200
            assert counted == [("other", 408)]

    asyncio.run(scene())


def test_what_is_not_http() -> None:
    async def scene() -> None:
        async with serving() as (connect, counted):
            opened = await connect()
            status, head, body = await answer(opened, b"\x16\x03\x01 this is TLS, perhaps\r\n\r\n")
            assert status == 400
            assert b"application/json" in head
            assert json.loads(body) == {"error": "this is not a valid HTTP/1.1 request", "error_type": "Validation"}
            assert await closed(opened)
            assert counted == [("other", 400)]

    asyncio.run(scene())


def test_garbage_behind_a_request_is_not_taken_for_its_answer() -> None:
    async def scene() -> None:
        async with serving() as (connect, counted):
            opened = await connect()
            opened[1].write(GET + b"\x00garbage\r\n\r\n")
            assert await closed(opened)
            assert counted == [("other", 400)]

    asyncio.run(scene())


def test_too_many_connections_are_refused_but_for_probes() -> None:
    with live(*STAND_IN, "--workers", "1", "--max-connections", "1") as server, server.client() as first:
        until(lambda: first.get("/livez").status_code == 200 and not _is_surplus(first), 5, what="a free place")
        refused = server.post("/v1/embeddings", {"input": "a"})
        assert (refused.status_code, refused.headers["retry-after"], refused.headers["connection"]) == (
            503,
            "1",
            "close",
        )
        assert "1 connections, the limit (--max-connections)" in refused.json()["error"]["message"]
        assert re.fullmatch("[0-9a-f]{32}", refused.headers["x-request-id"])
        assert server.get("/readyz").status_code == 200
        assert first.post("/embed", json={"inputs": "a"}).status_code == 200
        metrics = first.get("/metrics").text
        assert 'embert_rejected_total{reason="connections"} 1.0' in metrics
        assert 'embert_requests_total{route="/v1/embeddings",status="503"} 1.0' in metrics


def _is_surplus(client: httpx.Client) -> bool:
    return bool(client.get("/livez").headers.get("connection") == "close")


def test_too_many_connections() -> None:
    async def scene() -> None:
        async with serving(connections=2) as (connect, _):
            first, second, third = [await connect() for _ in range(3)]
            status, head, body = await answer(third, GET)
            assert (status, body) == (200, b"0 1")  # marked, for the gate
            assert b"connection: close" in head
            assert await closed(third)
            assert (await answer(first, GET))[2] == b"0 0"
            first[1].close()
            await asyncio.sleep(0.05)
            assert (await answer(await connect(), GET))[2] == b"0 0"
            assert (await answer(second, GET))[2] == b"0 0"
            assert await closed(await connect())  # one too many that asks nothing: a second, and it is gone

    asyncio.run(scene())
