"""Throttles low-priority requests on the event loop, so that interactive requests do not wait for many of them.

Requests that share batches equally are answered at the same time, and their clients ask again at the same time. Of 32
passages a request, each then keeps the loop busy for a millisecond: eight of them would hold up an interactive request
for eight. Throttled, the loop looks for new requests after about half a millisecond of low-priority work.
"""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["LowPriorityThrottle"]

_BYTES_OF_A_ROUND = 16_384  # of bodies to tokenize: about half a millisecond
_ANSWER_BYTES = 8  # of vectors that take as long to write as a byte to tokenize


class LowPriorityThrottle:
    """Lives on the event loop of one HTTP process; not thread-safe."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._spent = 0  # bytes of this round of the event loop
        self._counts = False  # whether a round is counted, and its end awaited

    async def before_tokenizing(self, body_bytes: int) -> None:
        """Wait until so many bytes of a body may be tokenized."""
        await self._take(body_bytes)

    async def before_response(self, vector_bytes: int) -> None:
        """Wait until so many bytes of vectors may be written."""
        await self._take(vector_bytes // _ANSWER_BYTES)

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
        """A round has at least one request, of any cost."""
        return not self._spent or self._spent + cost <= _BYTES_OF_A_ROUND

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
