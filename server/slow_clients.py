"""Clients that leave us waiting: for the rest of a body, or with an answer that they do not take.

Neither costs a usual request anything: no timer is set, but a few times a second somebody looks who waits for too long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, NoReturn, Protocol

from server.errors import PayloadTooLarge, RequestTimeout

__all__ = ["BodyReader", "end_slow_readers"]

Receive = Callable[[], Awaitable[Any]]  # ASGI's


class BodyReader:
    """Reads the bodies of one API process's requests."""

    def __init__(self, limit: int, patience_s: float) -> None:
        """`limit` is in bytes; `patience_s` is for every piece that the network brings."""
        self._limit, self._patience_s = limit, patience_s
        self._due: dict[asyncio.Task[Any], float] = {}  # who waits for a client, and until when
        self._late: set[asyncio.Task[Any]] = set()

    async def read(self, headers: list[tuple[bytes, bytes]], receive: Receive, deadline: float) -> bytes:
        """The whole body.

        Raises PayloadTooLarge as soon as it is known to be too large, RequestTimeout when nothing of it comes for too
        long or not all of it before `deadline` (CLOCK_MONOTONIC), CancelledError when the client left.
        """
        for name, value in headers:
            if name == b"content-length" and value.isdigit() and int(value) > self._limit:
                raise self._too_large(int(value))
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this is a coroutine
        try:
            return await self._pieces(task, receive, deadline)
        except asyncio.CancelledError:
            if task not in self._late:
                raise
            self._late.remove(task)
            task.uncancel()
            raise RequestTimeout("the request's body did not arrive in time (--client-timeout)") from None
        finally:
            self._due.pop(task, None)

    async def _pieces(self, task: asyncio.Task[Any], receive: Receive, deadline: float) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            self._due[task] = min(deadline, time.monotonic() + self._patience_s)
            message = await receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > self._limit:
                raise self._too_large(size)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def watch(self) -> NoReturn:
        """End what waits for too long; for ever."""
        while True:
            await asyncio.sleep(min(0.25, self._patience_s / 4))
            now = time.monotonic()
            for task in [task for task, due in self._due.items() if due < now]:
                del self._due[task]
                self._late.add(task)
                task.cancel()

    def _too_large(self, size: int) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"the request body has {size} bytes or more; the limit is {self._limit} (--payload-limit)"
        )


class _Connection(Protocol):
    transport: asyncio.Transport


async def end_slow_readers(
    connections: Collection[_Connection], patience_s: float, note: Callable[[], None]
) -> NoReturn:
    """Cut off connections whose client has taken nothing of its answer for `patience_s`, and `note` each; for ever.

    uvicorn's closing would wait until everything is sent, that is for ever too.
    """
    unread: dict[_Connection, tuple[int, float]] = {}  # bytes that wait, and since when they are so many
    while True:
        await asyncio.sleep(min(1.0, patience_s / 4))
        now = time.monotonic()
        before, unread = unread, {}
        for connection in list(connections):
            size = connection.transport.get_write_buffer_size()
            if not size:
                continue
            known = before.get(connection)
            unread[connection] = known if known is not None and known[0] == size else (size, now)
            if now - unread[connection][1] > patience_s:
                connection.transport.abort()
                note()
