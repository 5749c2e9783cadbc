"""Responses out of the bytes that a server sends, by h11."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import h11

HEAD_LIMIT = 64 * 1024


class Malformed(Exception):
    """The server sent something other than an HTTP/1.1 response."""


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes
    arrived: float  # its last byte, CLOCK_MONOTONIC

    @property
    def says_close(self) -> bool:
        return "close" in self.headers.get("connection", "").lower()


@dataclass(slots=True)
class ResponseReader:
    """Fed with bytes, gives responses. `methods` says what the next request is, without which HEAD cannot be read."""

    methods: Callable[[int], str]
    clock: Callable[[], float] = time.monotonic
    count: int = 0
    _connection: h11.Connection | None = None
    _head: h11.Response | None = None
    _body: list[bytes] = field(default_factory=list)
    _rest: bytes = b""
    _ended: bool = False

    @property
    def in_response(self) -> bool:
        """True if a response has begun and is not complete."""
        return bool(self._rest) or self._head is not None

    def feed(self, data: bytes) -> Iterator[Response]:
        """The responses that are whole now. Raises Malformed."""
        try:
            yield from self._feed(data)
        except h11.RemoteProtocolError as error:
            raise Malformed(str(error)) from None

    def _feed(self, data: bytes) -> Iterator[Response]:
        if self._ended:
            return
        self._rest += data
        while self._rest:
            if self._connection is None:
                self._connection = _awaiting(self.methods(self.count))
            self._connection.receive_data(self._rest)
            self._rest = b""
            response = self._next_response(self._connection)
            if response is None:
                if self._head is None:
                    # h11 keeps the part of a head; hold it here too, so that `in_response` is true.
                    self._rest, self._connection = self._connection.trailing_data[0], None
                return
            self._rest = self._connection.trailing_data[0]
            self._connection = None
            if self.methods(self.count) == "HEAD" and response.status >= 400 and response.says_close:
                # Refused before the method was known, so it may have a body; nothing that counts comes after it.
                self._ended, self._rest = True, b""
            self.count += 1
            yield response

    def _next_response(self, connection: h11.Connection) -> Response | None:
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                return None
            if isinstance(event, h11.InformationalResponse):
                if event.status_code == 101:
                    raise Malformed("the protocol was switched, which nobody may")
                continue
            if isinstance(event, h11.Response):
                _check_head(event)
                self._head = event
            elif isinstance(event, h11.Data):
                self._body.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return self._take()
            else:
                raise Malformed(f"an unexpected {event!r}")

    def _take(self) -> Response:
        assert self._head is not None
        head, body = self._head, b"".join(self._body)
        self._head, self._body = None, []
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        return Response(head.status_code, headers, body, self.clock())


def _check_head(head: h11.Response) -> None:
    names = {name for name, _ in head.headers}
    if head.http_version != b"1.1":
        raise Malformed(f"a response of HTTP/{head.http_version.decode()}")
    if (b"content-length" in names) == (b"transfer-encoding" in names) and head.status_code not in (204, 304):
        raise Malformed("a response without exactly one of Content-Length and Transfer-Encoding")


def _awaiting(method: str) -> h11.Connection:
    """A connection on which a request of this method has just been sent."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_LIMIT)
    connection.send(h11.Request(method=method, target="/", headers=[("host", "fuzz")]))
    connection.send(h11.EndOfMessage())
    return connection
