"""Limits the bytes that an HTTP process holds for its clients, checked before the work; reads bodies within that limit.

They are bodies, until the response is sent; reservations for responses, from before the work until they are written;
bytes of responses that clients have not read; and pipelined requests that wait for earlier ones.

A periodic sweep ends bodies that do not arrive. It replaces per-request timers, so an ordinary request pays nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from embert.server.http.errors import PayloadTooLarge, RequestError, Unavailable

SMALL_BYTES = 65_536  # requests up to this may use a quarter more, so that large requests do not block small ones


class HeldBytes:
    """Bytes that one process holds. Code that adds to `requests` or `unread` also subtracts it."""

    __slots__ = ("_small_limit", "limit", "requests", "unread")

    def __init__(self, limit: int) -> None:
        self.limit = limit  # --max-held-bytes
        self._small_limit = limit + limit // 4  # for requests of up to SMALL_BYTES
        self.requests = 0  # bodies, and reservations for responses
        self.unread = 0  # in connections' buffers

    @property
    def total(self) -> int:
        return self.requests + self.unread

    @property
    def scarce(self) -> bool:
        """True if unread responses use more than half of the limit."""
        return 2 * self.unread > self.limit

    @property
    def is_full(self) -> bool:
        """True if nothing more can be held, however small."""
        return self.total > self._small_limit

    def check(self, size: int, purpose: str, param: str | None = None, *, counted: int = 0) -> None:
        """Raise Unavailable where `size` bytes cannot be held now, PayloadTooLarge where they never can.

        `counted` of them are held already. `purpose` appears in the error, and `param` is its field.
        """
        if size > self.limit:
            reason = f"would have about {size} bytes"
            raise PayloadTooLarge(reason, param, subject=purpose, limit=self.limit, option="--max-held-bytes")
        limit = self.limit if size > SMALL_BYTES else self._small_limit
        if self.requests + self.unread + size - counted > limit:
            raise self.refusal(purpose, size)

    def refusal(self, purpose: str, size: int) -> Unavailable:
        """The error for a request that would exceed the limit."""
        return Unavailable(
            f"{purpose} would have {size} bytes, and this HTTP process holds {self.total} for its clients already",
            limit=self.limit,
            option="--max-held-bytes",
            retry_after_s=1,
            reject_reason="memory",
        )


Receive = Callable[[], Awaitable[Any]]  # ASGI's


class BodyReader:
    """Reads the bodies of one HTTP process's requests."""

    def __init__(self, limit: int, held: HeldBytes, timeout_s: float) -> None:
        """`limit` is of a body, in bytes; `timeout_s` is for each piece that the network brings."""
        self._limit, self._held, self._timeout_s = limit, held, timeout_s
        self._due: dict[asyncio.Task[Any], float] = {}  # tasks that wait for a client, and until when
        self._late: set[asyncio.Task[Any]] = set()

    async def read(self, headers: list[tuple[bytes, bytes]], receive: Receive, deadline: float, set_by: str) -> bytes:
        """The whole body, whose bytes stay counted. `set_by` is the option or the header that the deadline is from.

        Raises PayloadTooLarge as soon as it is known to be too large, Unavailable when it cannot be held,
        RequestError (408) when nothing of it comes for too long or not all of it before `deadline` (CLOCK_MONOTONIC),
        CancelledError when the client left.
        """
        for name, value in headers:
            if name == b"content-length" and value.isdigit():
                self.check(int(value), 0)
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
            raise RequestError(f"the request's body did not arrive in time ({limit})", status=408) from None
        finally:
            self._due.pop(task, None)

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
                self.check(len(body) + len(piece), len(body))
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

    def check(self, size: int, counted: int = 0) -> None:
        """Raises ServerError if a body may not grow to `size` bytes. `counted` of them are held already."""
        if size > self._limit:
            reason = f"the request body has {size} bytes or more"
            raise PayloadTooLarge(reason, limit=self._limit, option="--payload-limit")
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
