"""One HTTP connection, with the bounds that uvicorn's own httptools protocol lacks.

A connection is in exactly one state at a time, and each state has an end:

    idle        its client may ask something                     connections.py
    head        a request has begun                              HEAD_TIMEOUT_S, HEADER_LIMIT
    serving     the app reads a body, computes and responds      held_bytes.py, the request's deadline
    lingering   the last response is sent, its client is open    LingeringClose

An error in a request's head gets its response here, as JSON, counted, and after the responses to earlier requests. An
error in a body is raised in the app's `receive`.
"""

from __future__ import annotations

import asyncio
import http
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from embert.server.http.connections import Connections, ConnectionSlot
from embert.server.http.errors import BadRequest, ErrorFormats, RequestError, ServerError
from embert.server.http.held_bytes import HeldBytes
from embert.server.http.request_head import PLAIN_KEY, KnownHeads, check_headers, split_target, without_upgrade
from embert.server.http.response import Response, error_body

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent

_HEADER_LINE = b"%b: %b\r\n".__mod__
_JOINED_BYTES = 1 << 18  # a longer body is written after its head, which saves a copy


class HoldableFlow(FlowControl):
    """An app that waits for a body resumes reading, but not while `hold` says that too much is unparsed."""

    held = False
    body_bytes = 0  # of the newest response

    def hold(self) -> None:
        """Read nothing more until `release`."""
        self.held = True
        self.pause_reading()

    def release(self) -> None:
        """Read again, where `hold` stopped it."""
        if self.held:
            self.held = False
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class BoundedCycle(RequestResponseCycle):
    """A request and its response."""

    broken: ServerError | None = None  # error of the body, from here on
    closes = False  # the connection ends with this response
    flow: HoldableFlow
    task: asyncio.Task[None] | None = None  # runs `serve`

    async def receive(self) -> ASGIReceiveEvent:
        """ASGI receive. Raises ServerError for a malformed or late body."""
        message: ASGIReceiveEvent = {"type": "http.disconnect"}
        if self.broken is None:
            message = await super().receive()
        if self.broken is not None and not self.disconnected and not self.response_complete:
            raise self.broken
        return message

    async def serve(self, server: DirectServer, tasks: set[asyncio.Task[None]]) -> None:
        """Serves the request, which is complete, without ASGI. `tasks` are those of the process."""
        try:
            body, self.body = bytes(self.body), bytearray()
            scope: Scope = self.scope  # type: ignore[assignment]
            self.write(await server.serve(scope, None, body))
        except asyncio.CancelledError:
            pass  # the client has left
        finally:  # here, because a callback of a task costs a step of the event loop
            if self.task is not None:
                tasks.discard(self.task)
                self.task = None

    def write(self, response: Response) -> None:
        """Writes a whole response at once. Does nothing if the client has left."""
        if self.disconnected:
            return
        body = response.body
        close = b"" if self.keep_alive else b"connection: close\r\n"
        lines = b"".join(map(_HEADER_LINE, response.headers))
        head = b"%b%b%b\r\n" % (STATUS_LINE[response.status], lines, close)
        self.response_started = self.response_complete = True
        self.flow.body_bytes = len(body)
        self.closes, self.keep_alive = not self.keep_alive, True
        if len(body) < _JOINED_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)
        self.message_event.set()
        self.on_response()

    async def send(self, message: ASGISendEvent) -> None:
        begins = not self.response_started
        if message["type"] == "http.response.body":
            self.flow.body_bytes = len(message.get("body", b""))
        if begins and self.more_body:
            self.keep_alive = False  # where the rest of the body ends is not known yet
        await super().send(message)
        if begins:
            # The protocol closes, not the cycle: it may have to read on for a while.
            self.closes, self.keep_alive = not self.keep_alive, True


LINGER_QUIET_S = 2.0  # without a byte more
LINGER_S = 30.0  # in all
LINGER_BYTES = 128 << 20


class LingeringClose:
    """Begins at once. The owner reports arriving data, and the loss of the connection."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._bytes_left = LINGER_BYTES
        self._until, self._last = loop.time() + LINGER_S, loop.time()
        if transport.can_write_eof():  # TLS cannot: its clients know the end by the response's length
            transport.write_eof()
        self._timer = loop.call_later(LINGER_QUIET_S, self._check)

    def received(self, size: int) -> None:
        self._last = self._loop.time()
        self._bytes_left -= size
        if self._bytes_left < 0:
            self.cancel()
            self._transport.close()

    def cancel(self) -> None:
        """Stop the timer: the connection is closed."""
        self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        until = min(self._until, self._last + LINGER_QUIET_S)
        if now < until:
            self._timer = self._loop.call_later(until - now, self._check)
        else:
            self._transport.close()


Count = Callable[[str, int, "tuple[str, int] | None"], None]


class DirectServer(Protocol):
    """Serves complete requests without ASGI."""

    def serves(self, scope: Scope) -> bool:
        """True if it serves this request."""
        ...

    async def serve(self, scope: Scope, receive: None, body: bytes) -> Response:
        """Serves a request with this body. It is cancelled when the client leaves."""
        ...


HEAD_TIMEOUT_S = 20.0  # from a head's first byte to its last
HEADER_LIMIT = 65_536  # bytes of a request's line and headers, as in most proxies
SURPLUS_S = 3.0  # the longest life of a connection above the limit
_PIECE = 16_384  # bytes parsed at a time: the most that is parsed of pipelined requests in advance


def bounded_protocol(
    connections: Connections,
    held: HeldBytes,
    count: Count,
    error_formats: ErrorFormats,
    server: DirectServer | None = None,
) -> type[asyncio.Protocol]:
    """Returns the class that uvicorn instantiates for every connection.

    `count` takes route, status and client of responses that neither the application nor `server` gives.
    """
    bounds = _Bounds(connections, held, count, error_formats, server, KnownHeads())
    return type("Protocol", (_BoundedProtocol,), {"bounds": bounds})


@dataclass(frozen=True, slots=True)
class _Bounds:
    connections: Connections
    held: HeldBytes
    count: Count
    error_formats: ErrorFormats
    server: DirectServer | None
    known: KnownHeads


class _BoundedProtocol(HttpToolsProtocol):
    bounds: _Bounds
    cycle: BoundedCycle
    flow: HoldableFlow

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.url = b""
        self._unparsed = b""
        self._in_head = False
        self._in_body = False
        self._upgrades = False  # the head that has just ended asks for another protocol
        self._progressed = False  # the piece being parsed has completed something
        self._idle_bytes = 0  # in whole pieces that completed nothing: of a head, or around chunks
        self._serving: BoundedCycle | None = None
        self._unstarted: BoundedCycle | None = None  # starts once the data at hand is parsed: its body may be in it
        self._refusal: ServerError | None = None  # sent after the responses to earlier requests
        self._ignores_input = False
        self._surplus = False  # above the limit of connections
        self._last = False  # its next response is its last
        self._is_idle = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None  # of a surplus connection
        self._linger: LingeringClose | None = None
        self._counted = 0  # of the process's HeldBytes.unread

    # --- the connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = HoldableFlow(transport)
        connections = self.bounds.connections
        self._last = connections.draining
        slot = connections.add(self)
        if slot is ConnectionSlot.NONE:
            self._ignores_input = True
            transport.abort()
            return
        if slot is ConnectionSlot.SURPLUS:
            # Its first request is refused in frontend/serve.py. A response before the request could be lost: closing
            # resets a connection on which data still arrives.
            self._surplus = self._last = True
            self.app_state = {**self.app_state, "too_many_connections": connections.limit.served}
            self._end_timer = self.loop.call_later(SURPLUS_S, transport.abort)
        self._update_timers()

    def connection_lost(self, exc: Exception | None) -> None:
        self.bounds.connections.remove(self)
        self._unset_head_timer()
        if self._end_timer is not None:
            self._end_timer.cancel()
        if self._linger is not None:
            self._linger.cancel()
        self._unparsed = b""
        self.bounds.held.unread -= self._counted
        self._counted = 0
        self._ignores_input = True
        for cycle in (self._serving, *(cycle for cycle, _ in self.pipeline)):  # uvicorn tells only the newest
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()
        if self._serving is not None and (task := self._serving.task) is not None:
            task.add_done_callback(self.tasks.discard)  # one that has not begun does not run at all
            task.cancel()
        self.pipeline.clear()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.count_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.count_unread()

    def count_unread(self) -> None:
        """Note what this connection holds now, outside of requests; see HeldBytes."""
        size = len(self._unparsed)
        if buffered := self.transport.get_write_buffer_size():
            # A response keeps all its memory until the last of it is written.
            size = max(self._counted, size + max(buffered, self.flow.body_bytes))
        self.bounds.held.unread += size - self._counted
        self._counted = size

    def evict(self) -> bool:
        """Close for another connection. False while the client has not read its response."""
        if self.transport.get_write_buffer_size():
            return False
        self.transport.abort()  # closing would wait for the client to end TLS
        return True

    def shutdown(self) -> None:
        """Closes the connection after the request in progress. `Connections.drain` calls this."""
        self._last = True
        if self._serving is not None:
            self._serving.keep_alive = False
            self.cycle.keep_alive = False
        elif not self._in_head and self._refusal is None and self._linger is None:
            self.transport.close()

    # --- requests ---

    def data_received(self, data: bytes) -> None:
        if self._linger is not None:
            self._linger.received(len(data))
        elif not self._ignores_input:
            is_new = self._is_idle and not self._unparsed  # the first byte is that of a request
            if not is_new or not self._take_known(data):
                self._unparsed = self._unparsed + data if self._unparsed else data
                self._parse()
                if is_new and self._unstarted is not None:
                    self._learn(self._unstarted, data)
            if self._unstarted is not None:
                self._start(self._unstarted)
            self._update_timers()

    def _take_known(self, data: bytes) -> bool:
        """Take a whole request whose head is known, without the parser, which is between two requests."""
        head = self.bounds.known.find(data)
        if head is None:
            return False
        self.on_message_begin()
        self._in_head = False
        self.url = head.target
        self.headers += head.headers
        self.scope[PLAIN_KEY] = True  # type: ignore[literal-required]
        self._idle_bytes = 0
        self._begin("POST", "1.1", head.path, head.query, keep_alive=True)
        self.cycle.body += data[len(data) - head.body_bytes :]
        self.cycle.more_body = False
        self.cycle.message_event.set()
        return True

    def _learn(self, cycle: BoundedCycle, data: bytes) -> None:
        """Note the head of the only request in `data`, if the next one of this kind needs no parser."""
        if not (cycle.more_body or self.pipeline or self._in_head) and cycle.keep_alive:
            scope = cycle.scope
            self.bounds.known.learn(data, self.url, scope["raw_path"], scope["query_string"], self.headers)

    def _parse(self) -> None:
        """Parse what came, but nothing after a pipelined request that waits for earlier ones."""
        while self._unparsed and not self.pipeline and not self._ignores_input:
            piece, self._unparsed = self._unparsed[:_PIECE], self._unparsed[_PIECE:]
            self._progressed = False
            self._feed(piece)
            self._idle_bytes = 0 if self._progressed else self._idle_bytes + len(piece)
            if self._idle_bytes > HEADER_LIMIT:
                self._refuse(self._too_large())
        if self._unparsed:
            self.flow.hold()
            self.bounds.connections.unread.add(self)
            self.count_unread()
            if self.bounds.held.is_full:
                self._refuse(
                    self.bounds.held.refusal("a request that waits for earlier responses", len(self._unparsed))
                )
        elif self.flow.held:
            self.flow.release()
            self.bounds.connections.unread.discard(self)
            self.count_unread()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._unparsed = data[upgrade.args[0] :] + self._unparsed
            self._upgrades = False
            head = without_upgrade(self.parser.get_method(), self.url, self.parser.get_http_version(), self.headers)
            self.parser = _parser(self)  # the old one takes the body for the other protocol
            self._feed(head)
        except httptools.HttpParserError as error:
            if not self._ignores_input:  # else one of our callbacks has already refused
                reason = "HTTP/2" if self.parser.get_method() == b"PRI" else error
                self._refuse(BadRequest(f"this is not a valid HTTP/1.1 request: {reason}"))

    def on_message_begin(self) -> None:
        self._progressed = self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, and the app has begun with the headers
            name, value = name.lower(), value.rstrip(b" \t")
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._progressed = True
        try:
            size = len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])
            if size > HEADER_LIMIT:
                raise self._too_large()
            version = self.parser.get_http_version()
            check_headers(self.parser.get_method(), version, self.headers)
            target = split_target(self.url)
        except ServerError as error:
            self._refuse(error)
            raise  # so that the parser stops
        if self.parser.should_upgrade():
            self._upgrades = True
            return
        self._in_head, self._in_body = False, True
        self._unset_head_timer()
        method, keep_alive = self.parser.get_method().decode("ascii"), self.parser.should_keep_alive()
        self._begin(method, version, *target, keep_alive=keep_alive)

    def _begin(self, method: str, version: str, raw_path: bytes, query: bytes, *, keep_alive: bool) -> None:
        """A request's head is complete: hand it to the app, at once or after the requests before it."""
        path = raw_path.decode("ascii")
        self.scope["method"] = method
        self.scope["http_version"] = version
        self.scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        self.scope["raw_path"], self.scope["query_string"] = raw_path, query
        self.cycle = BoundedCycle(
            self.scope,
            self.transport,
            self.flow,
            self.logger,
            self.access_logger,
            self.access_log,
            self.server_state.default_headers,
            asyncio.Event(),
            self.expect_100_continue and version == "1.1",
            version == "1.1" and keep_alive and not self._last,
            self.on_response_complete,
        )
        if self._serving is None:
            self._serving = self._unstarted = self.cycle
        else:
            self.pipeline.appendleft((self.cycle, self.app))

    def _start(self, cycle: BoundedCycle) -> None:
        """Serves a request: directly if it is complete, else by the ASGI application."""
        self._unstarted = None
        server = self.bounds.server
        scope: Scope = cycle.scope  # type: ignore[assignment]
        is_complete = not (cycle.more_body or cycle.broken or self.flow.write_paused)
        if server is not None and is_complete and server.serves(scope):
            cycle.task = self.loop.create_task(cycle.serve(server, self.tasks))
            self.tasks.add(cycle.task)
        else:
            self._start_asgi_task(cycle, self.app)

    def on_body(self, body: bytes) -> None:
        self._progressed = True
        if self.cycle.response_complete:
            return
        self.cycle.body += body
        if len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._upgrades:
            return
        self._progressed, self._in_body = True, False
        self.cycle.more_body = False
        self.cycle.message_event.set()

    # --- responses ---

    def on_response_complete(self) -> None:
        cycle, self._serving = self._serving, None
        self.server_state.total_requests += 1
        if cycle is None or self.transport.is_closing():
            return
        more = cycle.more_body or self._ignores_input or self._unparsed or self.pipeline  # it came, or is to come
        if cycle.closes and (more or self.transport.can_write_eof()):
            self._linger_and_close()  # to close on data that is still to come would reset unread responses
        elif cycle.closes:
            self.transport.close()
        else:
            if self.pipeline:
                self._serving = self._unstarted = self.pipeline.pop()[0]  # type: ignore[assignment]
            if self.flow.read_paused:
                self.flow.resume_reading()
            if self._unparsed or self.flow.held:
                self._parse()
            if self._unstarted is not None:
                self._start(self._unstarted)
            self._update_timers()

    def _too_large(self) -> ServerError:
        if self._in_body:
            return BadRequest("there are too many bytes around the body's chunks", limit=HEADER_LIMIT)
        return RequestError("the request's line and headers are too large", limit=HEADER_LIMIT, status=431)

    def _head_too_slow(self) -> None:
        self._head_timer = None
        reason = f"the request's headers did not arrive within {HEAD_TIMEOUT_S:g} s"
        self._refuse(RequestError(reason, status=408))
        self._update_timers()

    def _refuse(self, error: ServerError) -> None:
        """Read nothing more from this connection; `error` is the last response."""
        self._ignores_input, self._unparsed = True, b""
        if self._in_body:
            self.cycle.broken = error
            self.cycle.message_event.set()
        else:
            self._refusal = error

    def _update_timers(self) -> None:
        """Run the timer of what this connection waits for now, and no other."""
        if self.transport.is_closing() or self._linger is not None:
            return
        busy = self._serving is not None
        if self._refusal is not None and not busy:
            self._send_refusal(self._refusal)
            return
        if self._in_head and not self._ignores_input and not self._unparsed:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_too_slow)
        elif self._head_timer is not None:
            self._unset_head_timer()
        if not busy and not self._in_head:
            if not self._is_idle:
                self._is_idle = True
                self.bounds.connections.mark_idle(self)
        elif self._is_idle:
            self._is_idle = False
            self.bounds.connections.mark_busy(self)

    def _send_refusal(self, error: ServerError) -> None:
        self.bounds.count("other", error.status, self.client)
        body = error_body(error, self.bounds.error_formats[self.url.partition(b"?")[0].decode("latin-1")])
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (error.status, http.HTTPStatus(error.status).phrase.encode(), len(body), body)
        )
        self._linger_and_close()

    def _linger_and_close(self) -> None:
        self._unset_head_timer()
        self._ignores_input, self._unparsed = True, b""
        self._linger = LingeringClose(self.transport, self.loop)
        self.flow.release()
        self.bounds.connections.unread.discard(self)
        self.flow.resume_reading()
        self.bounds.connections.mark_idle(self)

    def _unset_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _parser(protocol: _BoundedProtocol) -> Any:
    """A parser like uvicorn's: a request that closes the connection gets a response even if more data follows it."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
