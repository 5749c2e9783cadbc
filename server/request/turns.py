"""Turns on the event loop for the steps of large requests: one step in each iteration, or short ones up to SHARE_S.

A short request needs a few iterations of the event loop, and does not wait for a turn. Without turns, one iteration
would parse, tokenize or encode all large requests that are ready, 1 ms each. Turns cost large requests CPU time (5 %,
an estimate), because messages to the engine hold fewer requests. So there are none while no short requests arrive.

Large low-priority requests always take turns, in their own queue. Those that share batches end at the same time, and
their clients send the next ones at the same time: with 32 passages each, eight would keep the event loop busy for 8 ms.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

LARGE_BODY = 4096  # bytes from which a body is parsed and tokenized in a turn
LARGE_RESPONSE = 131_072  # reserved bytes from which a response is encoded in a turn: above those of any one vector
SHARE_S = 0.0003  # of an iteration, in which another step may begin: steps of 0.1 ms each would pay for an iteration
MEMORY_S = 10.0  # after a short request, another one is expected for so long, as in the engine's scheduler


class Turns:
    """The turns of one HTTP process, in the order in which they are requested."""

    def __init__(self) -> None:
        self.short_requests = 0  # so far; the owner counts them
        self._known_short_requests = 0
        self._short_expected_until = 0.0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False  # in this iteration
        self._began = 0.0  # when the last turn was given
        self._lock = asyncio.Lock()

    async def wait(self) -> None:
        """Returns when the caller may do a step of about a millisecond, before it awaits anything else."""
        now = time.perf_counter()
        if self._known_short_requests != self.short_requests:
            self._known_short_requests, self._short_expected_until = self.short_requests, now + MEMORY_S
        if now < self._short_expected_until:
            await self.take()

    async def take(self) -> None:
        """Waits for a turn, even while no short requests arrive."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken, self._began = True, time.perf_counter()
            loop.call_soon(self._next)
        elif self._waiting or time.perf_counter() - self._began > SHARE_S:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn

    async def run(self, steps: Iterable[Callable[[], object]], check_time: Callable[[], None]) -> None:
        """Runs steps that may take longer, each in a turn, after `check_time`. Raises what they raise.

        After each, the event loop has as much time for other requests. The steps of one request run at a time.
        """
        async with self._lock:
            for step in steps:
                await self.take()
                check_time()
                began = time.perf_counter()
                try:
                    step()
                finally:
                    await asyncio.sleep(time.perf_counter() - began)

    def _next(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its client has left
                self._began = time.perf_counter()
                turn.set_result(None)
                loop.call_soon(self._next)
                return
        self._taken = False
