"""The HTTP protocol on real sockets in one process, before an app that echoes.

Time is the event loop's, and `skip` lets it pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec
from unittest import mock

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from embert.server.frontend.routes import error_formats_by_path
from embert.server.http.connections import ConnectionLimit, Connections
from embert.server.http.errors import ErrorFormat, ServerError
from embert.server.http.held_bytes import HeldBytes
from embert.server.http.protocol import DirectServer, bounded_protocol
from embert.server.http.response import error_body
from embert.server.http.tls import with_tls

LIMIT = 4096
IDLE_S = 50.0
GET = b"GET /livez HTTP/1.1\r\nhost: h\r\n\r\n"
INNER = b"GET /inner HTTP/1.1\r\nhost: h\r\n\r\n"
GET_LARGE = b"GET /large HTTP/1.1\r\nhost: h\r\n\r\n"
EARLY = b"POST /early HTTP/1.1\r\nhost: h\r\ncontent-length: 30000000\r\n\r\n"
LARGE = bytes(range(256)) * 32_768  # more than kernels buffer
H2C = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA")
PATIENCE_S = 60  # limit of a test for what must happen


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time leaps where a test calls `skip`, and hardly passes while the machine does other work."""

    skipped_s = 0.0
    _passed_s = _looked = 0.0

    def time(self) -> float:
        now = super().time()
        self._passed_s += min(now - self._looked, 0.02)
        self._looked = now
        return self._passed_s + self.skipped_s


async def skip(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Clock)
    for _ in range(5):  # what is on its way arrives first
        await asyncio.sleep(0.002)
    loop.skipped_s += seconds
    await asyncio.sleep(0)


P = ParamSpec("P")
Scene = Callable[Concatenate["Serving", P], Coroutine[None, None, None]]


def scene(**options: Any) -> Callable[[Scene[P]], Callable[P, None]]:
    """A test that gets a server with these options of `serving`, and with the test's `tls` where it has one."""

    def decorate(test: Scene[P]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            async def play() -> None:
                tls: Any = kwargs.get("tls")
                async with serving(**options, tls=tls) as server:
                    await test(server, *args, **kwargs)

            with asyncio.Runner(loop_factory=Clock) as runner:
                runner.run(play())

        signature = inspect.signature(test)
        _, *fixtures = signature.parameters.values()
        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]  # what pytest reads
        return run

    return decorate


async def wait_until(condition: Callable[[], object]) -> None:
    """Until it is true, in real time."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass
class Response:
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
        """Sends each piece in its own packet."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0.002)

    async def response(self) -> Response:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        length = int(re.findall(rb"\r\ncontent-length: (\d+)\r\n", head)[0])
        return Response(int(head.split()[1]), head, await self.reader.readexactly(length))

    async def ask(self, *pieces: bytes) -> Response:
        await self.send(*pieces)
        return await self.response()

    async def rest(self) -> list[Response]:
        """All responses until the server closes its side."""
        responses = []
        while True:
            try:
                responses.append(await self.response())
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                if getattr(error, "partial", b""):
                    raise
                return responses

    async def is_open(self) -> bool:
        """True if another request is served."""
        return (await self.ask(GET)).status == 200


@dataclass
class Serving:
    connections: Connections
    held: HeldBytes
    make: Callable[[], asyncio.Protocol] = asyncio.Protocol
    port: int = 0
    made: int = 0  # protocols, one for each connection so far
    counted: list[tuple[str, int]] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)  # paths, in the order in which the app began with them
    left: int = 0  # requests whose clients left
    trust: ssl.SSLContext | None = None  # of clients, with TLS
    going: asyncio.Event = field(default_factory=asyncio.Event)  # `/slow` waits for it

    async def connect(self, *, plain: bool = False) -> Client:
        """A new connection, with TLS where the server has it and `plain` is false."""
        made = self.made
        client = Client(
            *await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24, ssl=None if plain else self.trust)
        )
        self.clients.append(client)
        await wait_until(lambda: self.made > made)
        await asyncio.sleep(0.002)  # the protocol gets its transport in the next round of the loop
        return client

    async def count(self, connections: int) -> None:
        await wait_until(lambda: len(self.connections) == connections)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Echoes path and body, and marks a connection above the limit."""
        self.asked.append(scope["path"])
        try:
            status, body = 200, await self._body(scope, receive)
        except ServerError as error:
            status, body = error.status, error_body(error, ErrorFormat.TEI)
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
        if path == "/large":
            return LARGE
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
async def serving(
    served: int = 100,
    surplus: int = 100,
    held: int = 1 << 30,
    tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
    app: ASGIApp | None = None,
    server: DirectServer | None = None,
) -> AsyncIterator[Serving]:
    """`tls` has the contexts of server and clients. `app` replaces the echo; `server` serves complete requests."""
    loop = asyncio.get_running_loop()
    serving = Serving(Connections(ConnectionLimit(served, surplus), IDLE_S, loop.time), HeldBytes(held))
    protocol = bounded_protocol(
        serving.connections,
        serving.held,
        lambda route, status, _: serving.counted.append((route, status)),
        error_formats_by_path(),
        server,
    )
    factory: Callable[..., asyncio.Protocol] = protocol
    if tls is not None:
        server_tls, serving.trust = tls
        factory = with_tls(protocol, lambda: server_tls, serving.connections)
    config = uvicorn.Config(
        app or serving.app, http=protocol, ws="none", interface="asgi3", lifespan="off", log_config=None
    )
    config.load()
    state = ServerState()

    def make() -> asyncio.Protocol:
        serving.made += 1
        return factory(config=config, server_state=state, app_state={}, _loop=loop)

    serving.make = make
    listening = await loop.create_server(serving.make, "127.0.0.1")
    serving.port = listening.sockets[0].getsockname()[1]
    watching = loop.create_task(serving.connections.watch())
    try:
        with mock.patch("embert.server.http.protocol.HEADER_LIMIT", LIMIT):
            yield serving
        for client in serving.clients:
            client.writer.transport.abort()
        await asyncio.wait_for(serving.count(0), PATIENCE_S)
        while state.tasks:
            await asyncio.sleep(0.002)
        assert not state.connections
        assert serving.held.unread == 0
    finally:
        for client in serving.clients:
            client.writer.transport.abort()
        watching.cancel()
        listening.close()


def post(body: bytes, path: str = "/echo", *headers: bytes) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"host: h", b"content-length: %d" % len(body), *headers, b"", body]
    return b"\r\n".join(lines)


def chunked(*chunks: bytes, path: str = "/echo", end: bytes = b"0\r\n\r\n") -> bytes:
    head = b"POST %b HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n" % path.encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + end


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]
