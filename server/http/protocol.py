"""One HTTP connection, with the bounds that uvicorn's own httptools protocol lacks.

A connection has exactly one reason to live at a time, and each has an end:

    idle        its client may ask something                     IDLE_TIMEOUT_S, less where its place is wanted
    head        a request has begun                              HEAD_TIMEOUT_S, --header-limit
    answering   the app reads a body, computes and answers       slow_clients, the request's deadline
    lingering   the answer is given before the request's end     LINGER_QUIET_S, LINGER_S, LINGER_BYTES

What is wrong before there is a request is answered as JSON and counted, like everything else, and after the answers to
the requests before it. What is wrong with a body is told to the app, which answers.
"""

from __future__ import annotations

import asyncio
import http
import re
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from embert.server.http.connections import Connections, Place
from embert.server.http.errors import BadRequest, HeadTooLarge, RequestTimeout, ServerError, error_body, speaks_openai

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent

__all__ = ["bounded_protocol"]

Count = Callable[[str, int], None]
IDLE_TIMEOUT_S = 75.0  # without a request; whatever else comes
HEAD_TIMEOUT_S = 20.0  # from a head's first byte to its last
SURPLUS_S = 3.0  # of a connection above the limit, whatever it sends
LINGER_QUIET_S = 2.0  # nothing more comes
LINGER_S = 30.0
LINGER_BYTES = 128 << 20
_PIECE = 16_384  # bytes parsed at a time: so much of the requests after the next one is parsed before their turn
# RFC 3986, host and port; an empty one is allowed where the target has none.
_HOST = re.compile(rb"(\[[0-9A-Za-z:.]+\]|[A-Za-z0-9\-._~%!$&'()*+,;=]*)(:[0-9]*)?")


def bounded_protocol(header_limit: int, connections: Connections, count: Count) -> type[asyncio.Protocol]:
    """The class that uvicorn makes an object of for every connection.

    `count` is told route and status of answers that no app gives.
    """
    return type("Protocol", (_Bounded,), {"bounds": _Bounds(header_limit, connections, count)})


@dataclass(frozen=True, slots=True)
class _Bounds:
    header_limit: int
    connections: Connections
    count: Count


class _Flow(FlowControl):
    """Apps that wait for a body go on reading; not while what was read already is too much."""

    held = False

    def hold(self) -> None:
        self.held = True
        self.pause_reading()

    def release(self) -> None:
        if self.held:
            self.held = False
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class _Cycle(RequestResponseCycle):
    """A request and its answer."""

    broken: ServerError | None = None  # what is wrong with the body, from here on
    closes = False  # the connection ends with this answer

    async def receive(self) -> ASGIReceiveEvent:
        message: ASGIReceiveEvent = {"type": "http.disconnect"}
        if self.broken is None:
            message = await super().receive()
        if self.broken is not None and not self.disconnected and not self.response_complete:
            raise self.broken
        return message

    async def send(self, message: ASGISendEvent) -> None:
        begins = not self.response_started
        if begins and self.more_body:
            self.keep_alive = False  # where the rest of the body ends is not known yet
        await super().send(message)
        if begins:
            # The protocol closes, not the cycle: it may have to read on for a while.
            self.closes, self.keep_alive = not self.keep_alive, True


class _Bounded(HttpToolsProtocol):
    bounds: _Bounds
    cycle: _Cycle
    flow: _Flow

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.url = b""
        self._unparsed = b""
        self._in_head = False
        self._in_body = False
        self._upgrades = False  # the head that has just ended asks for another protocol
        self._silent_bytes = 0  # that came in whole pieces since there was anything new: a head's, or around chunks
        self._heard = False
        self._answering: _Cycle | None = None
        self._refusal: ServerError | None = None  # to be answered when the requests before it are
        self._deaf = False  # what comes is not looked at any more
        self._surplus = False
        self._idle_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None  # of a surplus connection
        self._linger: _Linger | None = None

    # --- the connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        connections = self.bounds.connections
        place = connections.enter(self)
        if place is Place.NONE:
            self._deaf = True
            transport.abort()
            return
        if place is Place.SURPLUS:
            # The gate refuses its first request. An answer before the request could be lost: closing resets a
            # connection on which data still arrives.
            self._surplus = True
            self.app_state = {**self.app_state, "too_many_connections": connections.limit.served}
            self._end_timer = self.loop.call_later(SURPLUS_S, transport.abort)
        self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self.bounds.connections.leave(self)
        self._unset_timers()
        if self._end_timer is not None:
            self._end_timer.cancel()
        if self._linger is not None:
            self._linger.end()
        self._unparsed = b""
        self._deaf = True
        for cycle in (self._answering, *(cycle for cycle, _ in self.pipeline)):  # uvicorn tells the newest only
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def evict(self) -> bool:
        """Close, for another connection's sake. False while an answer is not taken yet."""
        if self.transport.get_write_buffer_size():
            return False
        self.transport.close()
        return True

    def shutdown(self) -> None:
        if self._answering is None:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    # --- what comes ---

    def data_received(self, data: bytes) -> None:
        if self._linger is not None:
            self._linger.heard(len(data))
        elif not self._deaf:
            self._unparsed = self._unparsed + data if self._unparsed else data
            self._parse()
            self._settle()

    def _parse(self) -> None:
        """Parse what came, but nothing behind a request that waits for its turn."""
        while self._unparsed and not self.pipeline and not self._deaf:
            piece, self._unparsed = self._unparsed[:_PIECE], self._unparsed[_PIECE:]
            self._heard = False
            self._feed(piece)
            self._silent_bytes = 0 if self._heard else self._silent_bytes + len(piece)
            if self._silent_bytes > self.bounds.header_limit:
                self._refuse(self._too_large())
        if self._unparsed:
            self.flow.hold()
        else:
            self.flow.release()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._unparsed = data[upgrade.args[0] :] + self._unparsed
            self._feed(self._head_without_upgrade())
        except httptools.HttpParserError as error:
            if not self._deaf:  # else one of our callbacks has refused
                reason = "HTTP/2" if self.parser.get_method() == b"PRI" else error
                self._refuse(BadRequest(f"this is not a valid HTTP/1.1 request: {reason}"))

    def _head_without_upgrade(self) -> bytes:
        """The head of a request that asks for another protocol, as that of one that does not; for a new parser.

        The old parser takes the body for the other protocol. RFC 9110 lets a server ignore `Upgrade`.
        """
        self._upgrades = False
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            kept = value
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                kept = b", ".join(token for token in tokens if token.lower() != b"upgrade")
            if name != b"upgrade" and (kept or not value):
                lines.append(name + b": " + kept)
        self.parser = _parser(self)
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        self._heard = self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, and the app has begun with the headers
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        self._heard = True
        try:
            self._check_head()
            target = self._target()
        except ServerError as error:
            self._refuse(error)
            raise  # so that the parser stops
        if self.parser.should_upgrade():
            self._upgrades = True
            return
        self._in_head, self._in_body = False, True
        self._unset_head_timer()
        self._begin(target)

    def _check_head(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.bounds.header_limit:
            raise self._too_large()
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise BadRequest(f"HTTP/1.1 and HTTP/1.0 are spoken here; this request is HTTP/{version}")
        if self.parser.get_method() == b"CONNECT":
            raise BadRequest("CONNECT is for proxies, which this server is not")
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            raise BadRequest(f"an HTTP/1.1 request must have one `Host`; this one has {len(hosts)}")
        if hosts and not _HOST.fullmatch(hosts[0]):
            raise BadRequest("`Host` must be a host, and perhaps a port")
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and [value.lower() for value in codings] != [b"chunked"]:
            raise BadRequest("`Transfer-Encoding` can be `chunked`, once; this request has another")

    def _target(self) -> tuple[bytes, bytes]:
        """The path, still quoted, and the query."""
        try:
            target = httptools.parse_url(self.url)
            path, query = target.path or b"/", target.query or b""
        except httptools.HttpParserInvalidURLError:
            path = query = b""
        if not path or not path.isascii():
            raise BadRequest("the request's target must be a path, in ASCII")
        return path, query

    def _begin(self, target: tuple[bytes, bytes]) -> None:
        """A request's head is complete: hand it to the app, at once or when its turn comes."""
        raw_path, query = target
        version, path = self.parser.get_http_version(), raw_path.decode("ascii")
        self.scope["method"] = self.parser.get_method().decode("ascii")
        self.scope["http_version"] = version
        self.scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        self.scope["raw_path"], self.scope["query_string"] = raw_path, query
        self.cycle = _Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue and version == "1.1",
            keep_alive=version == "1.1" and self.parser.should_keep_alive() and not self._surplus,
            on_response=self.on_response_complete,
        )
        if self._answering is None:
            self._answer(self.cycle)
        else:
            self.pipeline.appendleft((self.cycle, self.app))

    def _answer(self, cycle: _Cycle) -> None:
        self._answering = cycle
        self._start_asgi_task(cycle, self.app)

    def on_body(self, body: bytes) -> None:
        self._heard = True
        if self.cycle.response_complete:
            return
        self.cycle.body += body
        if len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._upgrades:
            return
        self._heard, self._in_body = True, False
        self.cycle.more_body = False
        self.cycle.message_event.set()

    # --- what is answered ---

    def on_response_complete(self) -> None:
        cycle, self._answering = self._answering, None
        self.server_state.total_requests += 1
        if cycle is None or self.transport.is_closing():
            return
        if cycle.closes and not cycle.more_body:
            self.transport.close()
        elif cycle.closes:
            self._read_on()
        else:
            if self.pipeline:
                self._answer(self.pipeline.pop()[0])  # type: ignore[arg-type]
            self.flow.resume_reading()
            self._parse()
            self._settle()

    def _too_large(self) -> ServerError:
        limit = self.bounds.header_limit
        if self._in_body:
            return BadRequest(f"around the body's chunks are more than {limit} bytes, the limit (--header-limit)")
        return HeadTooLarge(f"the request's line and headers have more than {limit} bytes, the limit (--header-limit)")

    def _head_too_slow(self) -> None:
        self._head_timer = None
        self._refuse(RequestTimeout(f"the request's headers did not arrive within {HEAD_TIMEOUT_S:g} s"))
        self._settle()

    def _refuse(self, error: ServerError) -> None:
        """Take nothing more from this connection; `error` is the answer to what came last."""
        self._deaf, self._unparsed = True, b""
        if self._in_body:
            self.cycle.broken = error
            self.cycle.message_event.set()
        else:
            self._refusal = error

    def _settle(self) -> None:
        """Set the timer of what this connection waits for now."""
        if self.transport.is_closing() or self._linger is not None:
            return
        busy = self._answering is not None
        if self._refusal is not None and not busy:
            self._answer_refusal(self._refusal)
            return
        if self._in_head and not self._deaf and not self._unparsed:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_too_slow)
        else:
            self._unset_head_timer()
        if not busy and not self._in_head:
            if self._idle_timer is None:
                self._idle_timer = self.loop.call_later(IDLE_TIMEOUT_S, self.transport.close)
                self.bounds.connections.waits(self)
        elif self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
            self.bounds.connections.works(self)

    def _answer_refusal(self, error: ServerError) -> None:
        self.bounds.count("other", error.status)
        body = error_body(error, openai=speaks_openai(self.url.partition(b"?")[0].decode("latin-1")))
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (error.status, http.HTTPStatus(error.status).phrase.encode(), len(body), body)
        )
        self._read_on()

    def _read_on(self) -> None:
        """Close when the client has done so, or after a while.

        Closing at once resets a connection on which data still arrives, and the client never sees its answer.
        """
        self._unset_timers()
        self._deaf, self._unparsed = True, b""
        self._linger = _Linger(self.transport, self.loop)
        self.flow.held = False
        self.flow.resume_reading()
        self.bounds.connections.waits(self)

    def _unset_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _unset_timers(self) -> None:
        self._unset_head_timer()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None


class _Linger:
    """The end of a connection whose answer is given while its request still arrives."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._bytes_left = LINGER_BYTES
        self._until, self._last = loop.time() + LINGER_S, loop.time()
        if transport.can_write_eof():  # TLS cannot: its clients know the end by the answer's length
            transport.write_eof()
        self._timer = loop.call_later(LINGER_QUIET_S, self._look)

    def heard(self, size: int) -> None:
        """So many more bytes came."""
        self._last = self._loop.time()
        self._bytes_left -= size
        if self._bytes_left < 0:
            self.end()
            self._transport.close()

    def end(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        until = min(self._until, self._last + LINGER_QUIET_S)
        if now < until:
            self._timer = self._loop.call_later(until - now, self._look)
        else:
            self._transport.close()


def _parser(protocol: _Bounded) -> Any:
    """As uvicorn makes them: data behind a request that closes the connection is no reason not to answer it."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
