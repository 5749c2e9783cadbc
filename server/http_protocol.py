"""One HTTP connection, with the bounds that uvicorn's own httptools protocol lacks.

A request's head has a size and a time; a process has so many connections. What is wrong before there is a request is
answered as JSON and counted, like everything else.
"""

from __future__ import annotations

import asyncio
import http
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import BadRequest, HeadTooLarge, RequestTimeout, ServerError, error_body

__all__ = ["bounded_protocol", "connection_limit"]

Count = Callable[[str, int], None]
HEAD_TIMEOUT_S = 20.0  # from a head's first byte to its last
_SPARE_FILES = 128  # descriptors that are not connections


def connection_limit(wanted: int) -> int:
    """Let this process open as many files as it may; returns how many of `wanted` connections that allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return wanted if hard == resource.RLIM_INFINITY else max(1, min(wanted, hard - _SPARE_FILES))


def bounded_protocol(header_limit: int, connections: int, count: Count) -> type[asyncio.Protocol]:
    """The class that uvicorn makes an object of for every connection.

    At most `connections` at a time are served. `count` is told route and status of answers that no app gives.
    """
    return type("Protocol", (_Bounded,), {"bounds": _Bounds(header_limit, connections, count)})


@dataclass(frozen=True, slots=True)
class _Bounds:
    header_limit: int
    connections: int
    count: Count


class _Bounded(HttpToolsProtocol):
    bounds: _Bounds

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head = False
        self._head_bytes = 0  # of the head so far, the data now being parsed included
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal: ServerError | None = None
        self._surplus = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        timeout_s: float = self.timeout_keep_alive
        self._surplus = len(self.connections) > self.bounds.connections
        if self._surplus:
            # The gate refuses its first request. An answer before the request could be lost: closing resets a
            # connection on which data still arrives.
            self.app_state = {**self.app_state, "too_many_connections": self.bounds.connections}
            timeout_s = 1.0
        self.timeout_keep_alive_task = self.loop.call_later(timeout_s, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()
        self._unset_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_head:
            self._head_bytes = 0
        elif self._head_bytes > self.bounds.header_limit:
            self._refuse(self._too_large())
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_too_slow)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._unset_head_timer()
        if self._head_bytes > self.bounds.header_limit:  # perhaps most of it is the body
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self.bounds.header_limit:
                self._refusal = self._too_large()
                raise self._refusal  # the parser stops, and send_400_response is called
        super().on_headers_complete()
        if self._surplus:
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for what is not HTTP, and for what our own callbacks raise."""
        del msg
        self._refuse(self._refusal or BadRequest("this is not a valid HTTP/1.1 request"))

    def _too_large(self) -> HeadTooLarge:
        limit = self.bounds.header_limit
        return HeadTooLarge(f"the request's line and headers have more than {limit} bytes, the limit (--header-limit)")

    def _head_too_slow(self) -> None:
        self._refuse(RequestTimeout(f"the request's headers did not arrive within {HEAD_TIMEOUT_S:g} s"))

    def _refuse(self, error: ServerError) -> None:
        """Answer and close; without a word while an earlier request is unanswered, whose answer this would seem."""
        self._in_head = False
        self._unset_head_timer()
        if self.transport.is_closing():
            return
        self.bounds.count("other", error.status)
        if self.cycle is None or self.cycle.response_complete:
            body = error_body(error, openai=False)
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                % (error.status, http.HTTPStatus(error.status).phrase.encode(), len(body), body)
            )
        self.transport.close()

    def _unset_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
