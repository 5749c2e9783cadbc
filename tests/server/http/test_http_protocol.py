"""What is before a request and behind it: framing, sizes, times and the number of connections.

Real sockets in one process; time is the loop's, and `Clock.skip` lets it pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from embert.server.http import protocol as http_protocol
from embert.server.http.connections import ConnectionLimit, Connections
from embert.server.http.errors import ServerError, error_body
from embert.server.http.protocol import bounded_protocol
from tests.server.live import STAND_IN, TRUST, live, until
from tests.server.stand_in import SLEEP

LIMIT = 4096
GET = b"GET /livez HTTP/1.1\r\nhost: h\r\n\r\n"
INNER = b"GET /inner HTTP/1.1\r\nhost: h\r\n\r\n"
PATIENCE_S = 20  # of a test, for what must happen


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time passes as it does, and by leaps when a test says so."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


async def skip(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Clock)
    for _ in range(5):  # what is on its way arrives first
        await asyncio.sleep(0.002)
    loop.skipped_s += seconds
    await asyncio.sleep(0)


def play(scene: Callable[[], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=Clock) as runner:
        runner.run(scene())


@dataclass
class Answer:
    status: int
    head: bytes
    body: bytes

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"])

    @property
    def closes(self) -> bool:
        return b"\r\nconnection: close\r\n" in self.head


@dataclass
class Client:
    """One end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, *pieces: bytes) -> None:
        """Each in a packet of its own."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0.002)

    async def answer(self) -> Answer:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        length = int(re.findall(rb"\r\ncontent-length: (\d+)\r\n", head)[0])
        return Answer(int(head.split()[1]), head, await self.reader.readexactly(length))

    async def ask(self, *pieces: bytes) -> Answer:
        await self.send(*pieces)
        return await self.answer()

    async def rest(self) -> list[Answer]:
        """All answers until the server closes its side."""
        answers = []
        while True:
            try:
                answers.append(await self.answer())
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                if getattr(error, "partial", b""):
                    raise
                return answers

    async def is_open(self) -> bool:
        """Whether another request is answered."""
        return (await self.ask(GET)).status == 200


@dataclass
class Serving:
    connections: Connections
    make: Callable[[], asyncio.Protocol] = asyncio.Protocol
    port: int = 0
    counted: list[tuple[str, int]] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)  # paths, in the order in which the app began with them
    left: int = 0  # requests whose clients left
    going: asyncio.Event = field(default_factory=asyncio.Event)  # `/slow` waits for it

    async def connect(self) -> Client:
        before = len(self.connections)
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24))
        self.clients.append(client)
        with contextlib.suppress(TimeoutError):  # it may be closed at once, or take another's place
            await asyncio.wait_for(self.count(before + 1), 0.1)
        return client

    async def count(self, connections: int) -> None:
        while len(self.connections) != connections:
            await asyncio.sleep(0.002)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with path, body, and whether the connection is one too many."""
        self.asked.append(scope["path"])
        try:
            status, body = 200, await self._body(scope, receive)
        except ServerError as error:
            status, body = error.status, error_body(error, openai=False)
        except asyncio.CancelledError:
            self.left += 1
            return
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        path: str = scope["path"]
        surplus = b" surplus" if "too_many_connections" in scope["state"] else b""
        if path == "/early":
            return b"early" + surplus
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            body, more = body + bytes(message["body"]), bool(message["more_body"])
        if path == "/slow":
            leaves = asyncio.ensure_future(receive())
            goes = asyncio.ensure_future(self.going.wait())
            await asyncio.wait([leaves, goes], return_when=asyncio.FIRST_COMPLETED)
            goes.cancel()
            if leaves.done():
                raise asyncio.CancelledError
            leaves.cancel()
        return path.encode() + b" " + body + surplus


@contextlib.asynccontextmanager
async def serving(served: int = 100, surplus: int = 100) -> AsyncIterator[Serving]:
    loop = asyncio.get_running_loop()
    serving = Serving(Connections(ConnectionLimit(served, surplus), loop.time))
    protocol = bounded_protocol(
        LIMIT, serving.connections, lambda route, status: serving.counted.append((route, status))
    )
    config = uvicorn.Config(serving.app, http=protocol, ws="none", interface="asgi3", lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    serving.make = lambda: protocol(config=config, server_state=state, app_state={}, _loop=loop)  # type: ignore[call-arg]
    listening = await loop.create_server(serving.make, "127.0.0.1")
    serving.port = listening.sockets[0].getsockname()[1]
    try:
        yield serving
        for client in serving.clients:
            client.writer.transport.abort()
        await asyncio.wait_for(serving.count(0), PATIENCE_S)
        while state.tasks:
            await asyncio.sleep(0.002)
        assert not state.connections
    finally:
        for client in serving.clients:
            client.writer.transport.abort()
        listening.close()


def post(body: bytes, path: str = "/echo", *headers: bytes) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"host: h", b"content-length: %d" % len(body), *headers, b"", body]
    return b"\r\n".join(lines)


def chunked(*chunks: bytes, path: str = "/echo", end: bytes = b"0\r\n\r\n") -> bytes:
    head = b"POST %b HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n" % path.encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + end


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


# --- heads ---


def head_of(size: int) -> bytes:
    start, end = b"POST /echo HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\nx-filler: ", b"\r\n\r\n"
    return start + b"x" * (size - len(start) - len(end)) + end


@pytest.mark.parametrize("piece", [1 << 20, 1000])
def test_a_head_has_a_size_in_one_piece_or_many(piece: int) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            for _ in range(2):  # the connection stays good
                answer = await client.ask(*cut(head_of(LIMIT - 20) + b"12345", piece))
                assert (answer.status, answer.body) == (200, b"/echo 12345")
            client = await server.connect()
            await client.send(*cut(head_of(LIMIT + 200) + b"12345", piece))
            (answer,) = await client.rest()
            assert (answer.status, answer.closes) == (431, True)
            assert json.loads(answer.body)["error_type"] == "Validation"
            assert f"{LIMIT} bytes" in answer.error
            assert server.counted == [("other", 431)]

    play(scene)


def test_a_head_that_never_ends_is_not_kept() -> None:
    async def scene() -> None:
        async with serving() as server:
            for pieces in ([b"GET / HTTP/1.1\r\nx: ", *[b"x" * 1000] * 5], [b"GET /" + b"x" * 100_000]):
                client = await server.connect()
                await client.send(*pieces)
                assert [answer.status for answer in await client.rest()] == [431]
            assert server.counted == [("other", 431)] * 2

    play(scene)


def test_a_large_body_is_not_a_large_head() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            for _ in range(2):
                assert len((await client.ask(post(b"x" * 50_000))).body) == 50_006
            assert not server.counted

    play(scene)


def test_a_slow_head() -> None:
    async def scene() -> None:
        async with serving() as server:
            slow, quick = await server.connect(), await server.connect()
            await slow.send(b"GET / HTTP/1.1\r\nhost:")
            await skip(http_protocol.HEAD_TIMEOUT_S / 2)
            await slow.send(b" h\r\n")  # the time is the whole head's
            assert (await quick.ask(GET[:20], GET[20:])).status == 200
            await skip(http_protocol.HEAD_TIMEOUT_S / 2 + 1)
            (answer,) = await slow.rest()
            assert (answer.status, answer.closes) == (408, True)
            assert "20 s" in answer.error
            await skip(http_protocol.HEAD_TIMEOUT_S)
            assert await quick.is_open()  # the time was the head's, not the connection's
            assert server.counted == [("other", 408)]

    play(scene)


TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(50)
WRONG = {
    "TLS": (TLS_HELLO, "not a valid HTTP/1.1 request"),
    "HTTP/2 with prior knowledge": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), "HTTP/2"),
    "HTTP/2.0": (b"GET / HTTP/2.0\r\nhost: h\r\n\r\n", "HTTP/2.0"),
    "HTTP/0.9": (b"GET /\r\n\r\n", "HTTP/0.9"),
    "no method": (b"BREWTEA / HTTP/1.1\r\nhost: h\r\n\r\n", "not a valid HTTP/1.1 request"),
    "CONNECT": (b"CONNECT h:80 HTTP/1.1\r\nhost: h\r\n\r\n" + GET, "CONNECT is for proxies"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", "one `Host`; this one has 0"),
    "two hosts": (b"GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", "one `Host`; this one has 2"),
    "two hosts of HTTP/1.0": (b"GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", "one `Host`; this one has 2"),
    "a host with a space": (b"GET / HTTP/1.1\r\nhost: a b\r\n\r\n", "`Host` must be"),
    "a host with a path": (b"GET / HTTP/1.1\r\nhost: a/b\r\n\r\n", "`Host` must be"),
    "a host with a user": (b"GET / HTTP/1.1\r\nhost: a@b\r\n\r\n", "`Host` must be"),
    "two lengths": (post(b"12345", "/echo", b"content-length: 4"), "Content-Length"),
    "a length below nothing": (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: -1\r\n\r\n", "Content-Length"),
    "length and chunks": (post(b"0\r\n\r\n", "/echo", b"transfer-encoding: chunked"), "Transfer-Encoding"),
    "chunks and length": (
        b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        "Content-Length",
    ),
    "another coding": (
        b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "`Transfer-Encoding` can be `chunked`",
    ),
    "chunked twice": (
        b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding",
    ),
    "a target that is none": (b"GET h:80 HTTP/1.1\r\nhost: h\r\n\r\n", "not a valid HTTP/1.1 request"),
    "a target without a host": (b"GET http:///x HTTP/1.1\r\nhost: h\r\n\r\n", "target must be a path"),
    "a target that is not ASCII": (b"GET /\xc3\xa9 HTTP/1.1\r\nhost: h\r\n\r\n", "not a valid HTTP/1.1 request"),
    "a space before a colon": (b"GET / HTTP/1.1\r\nhost : h\r\n\r\n", "not a valid HTTP/1.1 request"),
    "a folded header": (b"GET / HTTP/1.1\r\nhost: h\r\nx: a\r\n b\r\n\r\n", "not a valid HTTP/1.1 request"),
}


@pytest.mark.parametrize("size", [1 << 20, 1], ids=["whole", "byte by byte"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_heads_are_answered_once(name: str, size: int) -> None:
    async def scene() -> None:
        sent, said = WRONG[name]
        async with serving() as server:
            client = await server.connect()
            await client.send(*cut(sent, size))
            (answer,) = await client.rest()
            assert (answer.status, answer.closes) == (400, True)
            assert b"application/json" in answer.head
            assert json.loads(answer.body)["error_type"] == "Validation"
            assert said in answer.error
            assert server.counted == [("other", 400)]
            assert not server.asked

    play(scene)


@pytest.mark.parametrize(
    "head",
    [b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.1\r\nhost:\r\n\r\n", b"\r\n\r\nGET / HTTP/1.1\r\nhost: h\r\n\r\n",
     b"GET http://other HTTP/1.1\r\nhost: h\r\n\r\n", b"GET / HTTP/1.1\r\nhost: [::1]:80 \r\n\r\n",
     b"GET http://other/ HTTP/1.1\r\nHOST: under_score.example:8080\r\n\r\n"],
)  # fmt: skip
def test_heads_that_are_not_wrong(head: bytes) -> None:
    async def scene() -> None:
        async with serving() as server:
            answer = await (await server.connect()).ask(head)
            assert (answer.status, answer.body) == (200, b"/ ")

    play(scene)


def test_errors_before_the_app_speak_the_routes_dialect() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            answer = await client.ask(b"POST /v1/embeddings HTTP/1.1\r\n\r\n")
            assert json.loads(answer.body)["error"]["type"] == "invalid_request_error"

    play(scene)


# --- requests that ask for another protocol ---

H2C = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA")
UPGRADES = {
    "h2c": H2C,
    "websocket": (b"Connection: Upgrade", b"Upgrade: websocket"),
    "TLS": (b"Connection: keep-alive, upgrade", b"Upgrade: TLS/1.0"),
    "in two headers": (b"Upgrade: h2c", b"Connection: Upgrade", b"Connection: keep-alive", b"Upgrade: websocket"),
}


@pytest.mark.parametrize("size", [1 << 20, 7, 1], ids=["whole", "in sevens", "byte by byte"])
@pytest.mark.parametrize("name", UPGRADES)
def test_an_upgrade_is_ignored_and_the_body_stays_a_body(name: str, size: int) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            asks = post(INNER, "/echo", *UPGRADES[name])
            await client.send(*cut(asks + asks.replace(b"/echo", b"/next"), size))
            for path in (b"/echo", b"/next"):
                answer = await client.answer()
                assert (answer.status, answer.body, answer.closes) == (200, path + b" " + INNER, False)
                assert b"upgrade" not in answer.head.lower()
            assert await client.is_open()
            assert server.asked == ["/echo", "/next", "/livez"]

    play(scene)


@pytest.mark.parametrize("size", [1 << 20, 1], ids=["whole", "byte by byte"])
def test_an_upgrade_with_chunks(size: int) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            asks = chunked(b"abc", INNER).replace(b"\r\n\r\n", b"\r\n" + b"\r\n".join(H2C) + b"\r\n\r\n", 1)
            assert (await client.ask(*cut(asks, size))).body == b"/echo abc" + INNER
            assert await client.is_open()

    play(scene)


def test_an_upgrade_that_waits_for_continue_or_closes() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            asks = post(b"abc", "/echo", b"Expect: 100-continue", b"Connection: Upgrade, close", b"Upgrade: h2c")
            await client.send(asks[:-3])
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(b"abc" + INNER)
            (answer,) = await client.rest()
            assert (answer.body, answer.closes) == (b"/echo abc", True)
            assert server.asked == ["/echo"]

    play(scene)


# --- bodies ---


def test_a_body_in_chunks() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            for size in (1 << 20, 1):
                whole = chunked(b"abc", b"d" * 300, end=b"0;x=y\r\nhost: other\r\nx-request-id: no\r\n\r\n")
                assert (await client.ask(*cut(whole, size))).body == b"/echo abc" + b"d" * 300
            assert await client.is_open()

    play(scene)


@pytest.mark.parametrize("size", [1 << 20, 1], ids=["whole", "byte by byte"])
@pytest.mark.parametrize(
    "end",
    [b"zz\r\nhello\r\n", b"-5\r\nhello\r\n", b"ffffffffffffffffff\r\nhello", b"0x5\r\nhello\r\n", b"5 \r\nhello\r\n",
     b"5\nhello\n", b"5\r\nhelloXX", b"0\r\nx y: z\r\n\r\n"],
)  # fmt: skip
def test_bad_chunks_are_400(end: bytes, size: int) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.send(*cut(chunked(b"abc", end=end) + GET, size))
            (answer,) = await client.rest()
            assert (answer.status, answer.closes) == (400, True)
            assert "not a valid HTTP/1.1 request" in answer.error
            assert server.asked == ["/echo"]  # which was told, and answered in its own dialect

    play(scene)


def test_bad_chunks_of_a_request_that_waits_for_its_turn() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.send(post(b"a", "/slow") + chunked(b"abc", end=b"zz\r\n") + GET)
            server.going.set()
            assert [answer.status for answer in await client.rest()] == [200, 400]

    play(scene)


@pytest.mark.parametrize("end", [b"5;" + b"x" * 100_000, b"0\r\nx: " + b"x" * 100_000, b"0\r\n" + b"x: y\r\n" * 20_000])
def test_what_is_around_chunks_has_a_size(end: bytes) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.send(*cut(chunked(b"abc", end=end), 1000))
            (answer,) = await client.rest()
            assert answer.status == 400
            assert f"{LIMIT} bytes" in answer.error

    play(scene)


@pytest.mark.parametrize("size", [1 << 20, 1], ids=["whole", "byte by byte"])
def test_garbage_behind_a_request_is_answered_after_it(size: int) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.send(*cut(post(b"a", "/slow") + post(b"b") + b"\x00garbage\r\n\r\n" + GET, size))
            server.going.set()
            answers = await client.rest()
            assert [answer.status for answer in answers] == [200, 200, 400]
            assert [answer.closes for answer in answers] == [False, False, True]
            assert server.counted == [("other", 400)]

    play(scene)


# --- many requests at once ---


@pytest.mark.parametrize("size", [1 << 20, 4999, 61], ids=["whole", "in parts", "in sixties"])
def test_requests_behind_each_other_are_answered_in_order(size: int) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            bodies = [b"%d" % number for number in range(200)]
            whole = b"".join(post(body) if number % 2 else chunked(body) for number, body in enumerate(bodies))
            await client.send(*cut(whole, size))
            for body in bodies:
                assert (await client.answer()).body == b"/echo " + body
            assert await client.is_open()

    play(scene)


def test_a_long_body_is_not_part_of_the_next_head() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            second = post(b"second")
            await client.send(post(b"x" * 100_000, "/slow") + second[:40])
            await skip(http_protocol.HEAD_TIMEOUT_S - 1)
            await client.send(second[40:])
            server.going.set()
            assert len((await client.answer()).body) == 100_006
            assert (await client.answer()).body == b"/echo second"

    play(scene)


def test_a_head_that_waits_unread_is_not_slow() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            third = post(b"c" * 50)
            await client.send(post(b"a", "/slow") + post(b"b" * 20_000) + third[:30])
            await client.send(third[30:])
            await skip(http_protocol.HEAD_TIMEOUT_S + 1)
            server.going.set()
            assert [len((await client.answer()).body) for _ in range(3)] == [7, 20_006, 56]

    play(scene)


def test_requests_that_wait_are_not_read_without_end() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.send(post(b"a", "/slow"))
            client.writer.write(post(b"x" * 100_000) * 640)
            for _ in range(10):
                await skip(1)
            assert client.writer.transport.get_write_buffer_size() > 32_000_000  # of 64, but for what the kernel holds
            server.going.set()

    play(scene)


def test_all_requests_of_a_client_that_leaves_end() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.send(post(b"a", "/slow"), post(b"b", "/slow"))
            client.writer.transport.abort()
            await server.count(0)
            while server.left < 1:
                await asyncio.sleep(0.002)
            assert server.asked == ["/slow"]

    play(scene)


# --- connections that nobody needs ---


def test_idle_is_idle_whatever_trickles_in() -> None:
    async def scene() -> None:
        async with serving() as server:
            fresh, used = await server.connect(), await server.connect()
            assert await used.is_open()
            for _ in range(4):
                for client in (fresh, used):
                    await client.send(b"\r\n")
                await skip(http_protocol.IDLE_TIMEOUT_S / 5)
            assert len(server.connections) == 2
            await skip(http_protocol.IDLE_TIMEOUT_S / 4)
            assert not await fresh.rest()
            assert not await used.rest()

    play(scene)


def test_a_flood_of_empty_lines_ends() -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.send(b"\r\n" * LIMIT)
            assert [answer.status for answer in await client.rest()] == [431]

    play(scene)


EARLY = b"POST /early HTTP/1.1\r\nhost: h\r\ncontent-length: 30000000\r\n\r\n"


@pytest.mark.parametrize("pause_s", [http_protocol.LINGER_QUIET_S * 2, http_protocol.LINGER_QUIET_S / 2])
def test_an_early_answer_and_a_body_that_goes_on(pause_s: float) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            answer = await client.ask(EARLY + b"a")
            assert (answer.body, answer.closes) == (b"early", True)
            passed_s = 0.0
            with contextlib.suppress(ConnectionError):
                while len(server.connections) and passed_s < 2 * http_protocol.LINGER_S:
                    await client.send(INNER)
                    await skip(pause_s)
                    passed_s += pause_s
            if pause_s > http_protocol.LINGER_QUIET_S:
                assert passed_s <= 2 * pause_s
            else:
                assert http_protocol.LINGER_S <= passed_s <= http_protocol.LINGER_S + 2 * pause_s
            assert server.asked == ["/early"]

    play(scene)


def test_what_follows_an_early_answer_has_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_BYTES", 1_000_000)

    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.ask(EARLY)
            with pytest.raises(ConnectionError):
                await client.send(*[b"x" * 100_000] * 300)

    play(scene)


@pytest.mark.parametrize("wrong", [b"POST / HTTP/1.1\r\n\r\n", b"GET /" + b"x" * LIMIT * 9])
def test_a_refusal_is_read_by_who_sends_on(wrong: bytes) -> None:
    async def scene() -> None:
        async with serving() as server:
            client = await server.connect()
            await client.send(wrong, *[b"x" * 100_000] * 50)
            (answer,) = await client.rest()
            assert answer.status in (400, 431)

    play(scene)


# --- too many connections ---


def test_an_idle_connection_makes_room() -> None:
    async def scene() -> None:
        async with serving(served=2) as server:
            oldest, other = await server.connect(), await server.connect()
            assert await oldest.is_open()
            assert await other.is_open()
            assert await oldest.is_open()  # so the other has waited for longer
            third = await server.connect()
            assert (await third.ask(GET)).body == b"/livez "
            assert not await other.rest()
            assert await oldest.is_open()

    play(scene)


def test_too_many_connections() -> None:
    async def scene() -> None:
        async with serving(served=2, surplus=1) as server:
            busy = [await server.connect() for _ in range(2)]
            for client in busy:
                await client.send(post(b"a", "/slow"))
            while len(server.asked) < 2:
                await asyncio.sleep(0.002)
            third = await server.connect()
            assert not await (await server.connect()).rest()  # not even an answer
            answer = await third.ask(GET)
            assert (answer.body, answer.closes) == (b"/livez  surplus", True)  # marked, for the gate
            assert not await third.rest()
            await server.count(2)
            for sent in (b"", b"\r\n", GET[:9], EARLY, post(b"a", "/slow")):
                client = await server.connect()
                await client.send(sent)
                if sent == EARLY:
                    assert (await client.answer()).body == b"early surplus"
                await skip(http_protocol.SURPLUS_S + 0.1)
                await client.rest()
                await server.count(2)
            server.going.set()
            assert [(await client.answer()).status for client in busy] == [200, 200]

    play(scene)


def test_too_many_connections_are_refused_but_for_probes() -> None:
    with (
        live(*STAND_IN, "--workers", "1", "--max-connections", "1", "--metrics-port", "0") as server,
        server.client() as first,
        ThreadPoolExecutor(1) as pool,
    ):
        assert first.post("/embed", json={"inputs": "a"}).status_code == 200
        busy = pool.submit(first.post, "/embed", json={"inputs": [[101, SLEEP + 40, 102]]})
        admitted = "embert_admitted_tokens 3.0"
        until(lambda: admitted in httpx.get(f"{server.metrics_url}/metrics", verify=TRUST).text, what="the request")
        refused = server.post("/v1/embeddings", {"input": "a"})
        assert (refused.status_code, refused.headers["retry-after"], refused.headers["connection"]) == (
            503,
            "1",
            "close",
        )
        assert "1 connections, the limit (--max-connections)" in refused.json()["error"]["message"]
        assert re.fullmatch("[0-9a-f]{32}", refused.headers["x-request-id"])
        assert server.get("/readyz").status_code == 200
        assert busy.result().status_code == 200
        metrics = server.metrics()  # takes the idle connection's place
        assert metrics['embert_rejected_total{reason="connections"}'] >= 1
        assert metrics['embert_requests_total{route="/v1/embeddings",status="503"}'] == 1


# --- anything at all ---

TOKENS = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"0\r\n\r\n",
    b"Upgrade: h2c\r\nConnection: Upgrade\r\n", b"Expect: 100-continue\r\n", b"\xff", b"HTTP/1.0", b"GET ", b"\r\n\r\n",
    b"Connection: close\r\n", b"Host: evil\r\n", b"Content-Length: 99999999\r\n", b"5\r\nhello\r\n", b"CONNECT ",
)  # fmt: skip


def mutated(chance: random.Random) -> bytes:
    paths = ("/echo", "/early", "/v1/echo")
    parts = [
        chance.choice(
            (
                post(INNER, chance.choice(paths)),
                chunked(b"abc", INNER, path=chance.choice(paths)),
                post(INNER, "/echo", *H2C),
                GET,
            )
        )
        for _ in range(chance.choice((1, 1, 2, 5)))
    ]
    data = bytearray(b"".join(parts))
    for _ in range(chance.choice((0, 1, 1, 2, 3, 6))):
        at = chance.randrange(len(data))
        match chance.randrange(4):
            case 0:
                data[at] = chance.randrange(256)
            case 1:
                del data[at : at + chance.choice((1, 2, 8, 30))]
            case 2:
                data[at:at] = chance.choice(TOKENS)
            case 3:
                line = data.find(b"\r\n", at)
                data[line + 2 : line + 2] = chance.choice(TOKENS)
        data = data or bytearray(b"G")
    return bytes(data)


class Pipe(asyncio.Transport):
    """What a client sends, piece by piece, into a protocol without a socket."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._protocol, self._paused, self._closing = protocol, False, False
        self.written = b""
        self.ended = False
        protocol.connection_made(self)

    async def feed(self, pieces: list[bytes]) -> None:
        for piece in pieces:
            for _ in range(1000):
                if not self._paused or self._closing:
                    break
                await asyncio.sleep(0)
            else:
                raise AssertionError("reading stopped for ever")
            if self._closing:
                return
            self._protocol.data_received(piece)
            await asyncio.sleep(0)

    def write(self, data: Any) -> None:
        assert not self.ended, "written after the end"
        self.written += data

    def write_eof(self) -> None:
        self.ended = True

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        if not self._closing:
            self._closing = self.ended = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


@pytest.mark.parametrize("seed", range(4))
def test_anything_is_answered_the_same_way_however_it_is_cut(seed: int) -> None:
    """Whatever comes ends in a finite time, and the answers depend on the bytes, not on the packets."""
    chance = random.Random(seed)

    async def exchange(make: Callable[[], asyncio.Protocol], server: Serving, pieces: list[bytes]) -> list[Any]:
        pipe = Pipe(make())
        await pipe.feed(pieces)
        for seconds in (http_protocol.HEAD_TIMEOUT_S, http_protocol.IDLE_TIMEOUT_S, http_protocol.LINGER_S):
            for _ in range(10):
                await asyncio.sleep(0)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, Clock)
            loop.skipped_s += seconds + 1
            for _ in range(10):
                await asyncio.sleep(0)
            if server.left or not len(server.connections):
                break
        waiting = len(server.connections)
        pipe.abort()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not len(server.connections)
        written = pipe.written.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        found = re.findall(rb"HTTP/1\.1 (\d{3}) [^\r]*\r\n(?:[^\r]+\r\n)*?content-length: (\d+)\r\n", written)
        # Errors have the dialect of as much of the path as was known.
        return [*((int(status), int(length) if status == b"200" else 0) for status, length in found), waiting]

    async def scene() -> None:
        async with serving() as server:
            for _ in range(150):
                data = mutated(chance)
                whole = await exchange(server.make, server, [data])
                statuses = [status for status, _ in whole[:-1]]
                assert set(statuses) <= {200, 400, 408, 431}, data
                assert set(statuses[:-1]) <= {200}, data  # whatever is wrong is the last
                places = sorted(chance.sample(range(len(data) + 1), min(len(data), chance.choice((1, 5, 40)))))
                pieces = [data[a:b] for a, b in itertools.pairwise((0, *places, len(data))) if a < b]
                for cuts in (pieces, cut(data, 1)):
                    found = await exchange(server.make, server, cuts)
                    # An answer before the request's end is the last one; in one packet, the end is there already.
                    early = b"/early" in data and whole[: len(found) - 1] == found[:-1]
                    assert found == whole or early, (data, cuts)

    play(scene)
