"""One case over one raw socket: everything that came back, and when."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
import time
from dataclasses import dataclass, field

from tests.fuzz.cases import Case, Ending
from tests.fuzz.reading import End, Reading, Request, read
from tests.fuzz.responses import Malformed, Response, ResponseReader

SENTINEL = b"sentinel"
_ASK = b"GET /livez HTTP/1.1\r\nHost: fuzz\r\nX-Request-Id: %b\r\n\r\n" % SENTINEL


class Outcome(enum.Enum):
    """The end of a connection."""

    OPEN = "open"  # and sent a response to the sentinel, where there was one
    CLOSED = "closed"
    RESET = "reset"
    LATE = "late"  # what was due did not come
    LEFT = "left"  # by the client, before any response


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits for a server."""

    timeout_s: float = 5.0  # its --request-timeout, for requests that do not say
    slack_s: float = 1.0  # beyond a request's deadline


@dataclass(slots=True)
class Exchange:
    case: Case
    reading: Reading
    responses: list[Response] = field(default_factory=list)
    outcome: Outcome = Outcome.OPEN
    malformed: str = ""
    truncated: bool = False  # a response began and did not end
    sentinel_sent: bool = False
    half_closed: bool = False
    waited_s: float = 0.0  # for what was late
    sent: int = 0  # bytes


async def exchange(address: tuple[str, int], case: Case, limits: Limits) -> Exchange:
    """Send `case` to `address` and collect what comes."""
    done = Exchange(case, read(case.stream))
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    sock.setblocking(False)
    try:
        await loop.sock_connect(sock, address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await _Connection(sock, done, limits).run()
    finally:
        sock.close()
    return done


class _Connection:
    def __init__(self, sock: socket.socket, done: Exchange, limits: Limits) -> None:
        self._sock, self._done, self._limits = sock, done, limits
        self._loop = asyncio.get_running_loop()
        reading = done.reading
        self._asked: list[Request] = [*reading.requests]
        if reading.tail is not None and reading.end is not End.HEAD:
            self._asked.append(reading.tail)
        self._reader = ResponseReader(self._method)
        self._sent_at: list[tuple[int, float]] = []  # bytes written, and when
        self._stream = done.case.stream

    def _method(self, index: int) -> str:
        return self._asked[index].method if index < len(self._asked) else "GET"

    async def run(self) -> None:
        writer = asyncio.ensure_future(self._write())
        try:
            match self._done.case.ending:
                case Ending.CLOSE | Ending.RESET:
                    # A server that does not read must not hold us up.
                    await asyncio.wait([writer], timeout=self._limits.slack_s)
                    self._leave()
                case Ending.HALF:
                    await self._read_until(len(self._asked) + 1, writer)
                case Ending.ASK:
                    await self._converse(writer)
        except Malformed as error:
            self._done.malformed = str(error)
            self._done.outcome = Outcome.CLOSED
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            self._done.truncated = self._reader.in_response

    def _leave(self) -> None:
        self._done.outcome = Outcome.LEFT
        if self._done.case.ending is Ending.RESET:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def _write(self) -> None:
        case = self._done.case
        for piece in case.pieces:
            try:
                await self._loop.sock_sendall(self._sock, piece)
            except OSError:
                return  # the reader sees why
            self._done.sent += len(piece)
            self._sent_at.append((self._done.sent, time.monotonic()))
            if case.pause_s:
                await asyncio.sleep(case.pause_s)
        if case.ending is Ending.HALF:
            self._half_close()

    def _half_close(self) -> None:
        self._done.half_closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    async def _converse(self, writer: asyncio.Future[None]) -> None:
        """Read what is due, then ask once more: a surplus response would come before that of this request."""
        reading, done = self._done.reading, self._done
        await self._read_until(len(self._asked), writer)
        if done.outcome is not Outcome.OPEN:
            return
        alive = not (done.responses and done.responses[-1].says_close)
        if reading.end is End.CLEAN and alive:
            await asyncio.wait([writer])
            done.sentinel_sent = True
            self._asked.append(read(_ASK).requests[0])
            with contextlib.suppress(OSError):
                await self._loop.sock_sendall(self._sock, _ASK)
            await self._read_until(len(self._asked), writer)
            return
        if reading.end in (End.HEAD, End.BODY) and alive:
            await asyncio.wait([writer], timeout=self._limits.slack_s)
            self._half_close()
        await self._read_until(len(self._asked) + 1, writer)  # until the server closes

    async def _read_until(self, count: int, writer: asyncio.Future[None]) -> None:
        """Read until `count` responses are here, the connection ends, or something is late."""
        done = self._done
        began = last = time.monotonic()
        while len(done.responses) < count:
            due = self._due(began, last, writer)
            try:
                data = await asyncio.wait_for(self._loop.sock_recv(self._sock, 1 << 18), due - time.monotonic())
            except TimeoutError:
                try:
                    data = self._sock.recv(1 << 18)  # here already, if it was this process that came late
                except BlockingIOError:
                    done.outcome, done.waited_s = Outcome.LATE, time.monotonic() - last
                    return
                except OSError:
                    done.outcome = Outcome.RESET
                    return
            except OSError:
                done.outcome = Outcome.RESET
                return
            if not data:
                done.outcome = Outcome.CLOSED
                return
            last = time.monotonic()
            done.responses += self._reader.feed(data)

    def _due(self, began: float, last: float, writer: asyncio.Future[None]) -> float:
        """Deadline of the next response, or of the next part of it."""
        index = len(self._done.responses)
        sent = began
        timeout_s = 0.0
        if index < len(self._asked):
            request = self._asked[index]
            wanted = request.end or request.head_end or len(self._stream)
            if self._done.reading.end is End.BROKEN and request is self._done.reading.tail:
                wanted = len(self._stream)
            # Its last byte, or while it is not written the latest that was.
            sent = next((at for count, at in self._sent_at if count >= wanted), None) or (
                self._sent_at[-1][1] if self._sent_at else began
            )
            own_s = request.timeout_s or self._limits.timeout_s
            timeout_s = min(own_s, self._limits.timeout_s)
        elif not writer.done() and self._sent_at:
            sent = self._sent_at[-1][1]
        return max(sent, last, began) + timeout_s + self._limits.slack_s
