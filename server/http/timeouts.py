"""Slow clients: those that do not send the rest of a body, and those that do not read their answer.

A periodic sweep replaces per-request timers, so an ordinary request pays nothing.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn

from embert.server.http.connections import Connection
from embert.server.http.errors import PayloadTooLarge, RequestTimeout
from embert.server.http.held_bytes import HeldBytes

__all__ = ["BodyReader", "end_slow_readers", "unread_bytes"]

LEAST_TAKEN = 16_384  # bytes of an answer that a client must read in --client-timeout
LEAST_TAKEN_PER_S = 32_768  # and where memory is scarce, so many a second
Receive = Callable[[], Awaitable[Any]]  # ASGI's


class BodyReader:
    """Reads the bodies of one API process's requests."""

    def __init__(self, limit: int, held: HeldBytes, timeout_s: float) -> None:
        """`limit` is of a body, in bytes; `timeout_s` is for each piece that the network brings."""
        self._limit, self._held, self._timeout_s = limit, held, timeout_s
        self._due: dict[asyncio.Task[Any], float] = {}  # tasks that wait for a client, and until when
        self._late: set[asyncio.Task[Any]] = set()

    async def read(self, headers: list[tuple[bytes, bytes]], receive: Receive, deadline: float, set_by: str) -> bytes:
        """The whole body, whose bytes stay counted. `set_by` is the option or the header that the deadline is from.

        Raises PayloadTooLarge as soon as it is known to be too large, Unavailable when it cannot be held,
        RequestTimeout when nothing of it comes for too long or not all of it before `deadline` (CLOCK_MONOTONIC),
        CancelledError when the client left.
        """
        for name, value in headers:
            if name == b"content-length" and value.isdigit():
                self._check(int(value), 0)
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this is a coroutine
        try:
            return await self._pieces(task, receive, deadline)
        except asyncio.CancelledError:
            if task not in self._late:
                raise
            self._late.remove(task)
            task.uncancel()
            limit = "--client-timeout" if time.monotonic() < deadline else set_by
            raise RequestTimeout(f"the request's body did not arrive in time ({limit})") from None
        finally:
            self._due.pop(task, None)

    def check(self, size: int) -> None:
        """Raise what `read` does for a body of this size that came with its head."""
        self._check(size, 0)

    async def _pieces(self, task: asyncio.Task[Any], receive: Receive, deadline: float) -> bytes:
        held, complete = self._held, False
        body = bytearray()  # a list of small pieces would take more memory than their bytes
        try:
            while True:
                self._due[task] = min(deadline, time.monotonic() + self._timeout_s)
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise asyncio.CancelledError
                piece: bytes = message.get("body", b"")
                self._check(len(body) + len(piece), len(body))
                more = message.get("more_body", False)
                held.requests += len(piece)
                complete = not more
                if complete and not body:
                    return piece
                body += piece
                if complete:
                    return bytes(body)
        finally:
            if not complete:
                held.requests -= len(body)

    def _check(self, size: int, counted: int) -> None:
        """Raise where a body may not grow to `size` bytes; `counted` of them are held already."""
        if size > self._limit:
            raise PayloadTooLarge(
                f"the request body has {size} bytes or more; the limit is {self._limit} (--payload-limit)"
            )
        self._held.check(size, "the request body", counted=counted)

    async def watch(self) -> NoReturn:
        """End the reads that have waited for too long; for ever."""
        while True:
            await asyncio.sleep(min(0.25, self._timeout_s / 4))
            now = time.monotonic()
            for task in [task for task, due in self._due.items() if due < now]:
                del self._due[task]
                self._late.add(task)
                task.cancel()


def unread_bytes(connection: Connection) -> int:
    """Bytes of an answer that the client's machine has not taken; 0 where all of it is in the kernel.

    The kernel holds megabytes. Without them, the number would stand still for long while a client reads steadily.
    """
    size = connection.transport.get_write_buffer_size()
    if not size or (file := connection.transport.get_extra_info("socket").fileno()) < 0:
        return size
    return size + int.from_bytes(fcntl.ioctl(file, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


async def end_slow_readers(
    connections: Iterable[Connection], held: HeldBytes, timeout_s: float, on_end: Callable[[], None]
) -> NoReturn:
    """Abort connections whose client has read fewer than LEAST_TAKEN bytes of its answer in `timeout_s`; for ever.

    Where memory is scarce, it must have read more. `on_end` is called for each. Closing would wait until everything is
    sent, which may never happen.
    """
    unread: dict[Connection, tuple[int, float]] = {}  # bytes that waited, and since when too few were read
    while True:
        await asyncio.sleep(min(1.0, timeout_s / 4))
        now = time.monotonic()
        before, unread = unread, {}
        least = max(LEAST_TAKEN, int(timeout_s * LEAST_TAKEN_PER_S)) if held.scarce else LEAST_TAKEN
        for connection in list(connections):
            connection.count_unread()
            size = unread_bytes(connection)
            if not size:
                continue
            known = before.get(connection)
            stuck = known is not None and known[0] - least < size <= known[0]
            unread[connection] = known if known is not None and stuck else (size, now)
            if now - unread[connection][1] > timeout_s:
                connection.transport.abort()
                on_end()
