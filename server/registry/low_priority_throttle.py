"""Throttles low-priority requests on the event loop, so that interactive requests do not wait for many of them.

Requests that share batches equally end at the same time, and their clients send the next ones at the same time. With 32
passages each, eight of them keep the event loop busy for eight milliseconds, in which an interactive request waits.
With the throttle, the loop accepts new requests after about half a millisecond of low-priority work.
"""

from __future__ import annotations

import asyncio
from collections import deque

_ROUND_BYTES = 16_384  # of bodies to tokenize in one iteration of the event loop: about half a millisecond
_VECTOR_BYTES = 8  # of vectors, which take as long to write as one byte of a body to tokenize


class LowPriorityThrottle:
    """Counts the work of one HTTP process in each iteration of its event loop. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._spent = 0  # bytes of this iteration
        self._counts = False  # a callback awaits the end of this iteration

    async def before_tokenizing(self, body_bytes: int) -> None:
        """Waits until `body_bytes` of a body may be tokenized."""
        await self._take(body_bytes)

    async def before_response(self, vector_bytes: int) -> None:
        """Waits until `vector_bytes` of vectors may be written."""
        await self._take(vector_bytes // _VECTOR_BYTES)

    async def _take(self, cost: int) -> None:
        loop = asyncio.get_running_loop()
        if not self._waiting and self._fits(cost):
            self._spent += max(cost, 1)
            if not self._counts:
                self._counts = True
                loop.call_soon(self._next_round)
            return
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append((cost, waiter))
        await waiter

    def _fits(self, cost: int) -> bool:
        """True if the cost fits into this iteration. The first request of an iteration may have any cost."""
        return not self._spent or self._spent + cost <= _ROUND_BYTES

    def _next_round(self) -> None:
        self._spent = 0
        self._counts = False
        while self._waiting and self._fits(self._waiting[0][0]):
            cost, waiter = self._waiting.popleft()
            if waiter.done():  # its request was cancelled
                continue
            waiter.set_result(None)
            self._spent += max(cost, 1)
            self._counts = True
        if self._counts:
            asyncio.get_running_loop().call_soon(self._next_round)
