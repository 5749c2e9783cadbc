"""One process's share of a load: raw sockets, prebuilt bytes, and just enough HTTP to find the end of an response."""

from __future__ import annotations

import asyncio
import collections
import ctypes
import gc
import os
import time
from typing import cast

import numpy as np
import uvloop

from benchmarks.lib.load_plan import LOST, NO_RESPONSE, Plan, Responses


class Timer:
    """One timer on CLOCK_MONOTONIC. Python has timerfd in `os` since 3.13 only."""

    CLOCK_MONOTONIC = 1
    TFD_TIMER_ABSTIME = 1

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.timerfd_create(self.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def set(self, moment: float) -> None:
        """Expire at `moment`, seconds on CLOCK_MONOTONIC; at once if that has passed."""
        seconds, fraction = divmod(moment, 1.0)
        value = (ctypes.c_long * 4)(0, 0, int(seconds), int(fraction * 1e9))  # interval, then expiry
        self._libc.timerfd_settime(self.fd, self.TFD_TIMER_ABSTIME, ctypes.byref(value), None)

    def read(self) -> None:
        """Acknowledge an expiry; until then the descriptor stays readable."""
        os.read(self.fd, 8)

    def close(self) -> None:
        os.close(self.fd)


PATIENCE_S = 60.0  # for responses that are still due when the window closes


def run(plan: Plan, first: float) -> Responses:
    """Run `plan` and send its first request at `first` (CLOCK_MONOTONIC)."""
    gc.disable()
    try:
        return uvloop.run(_Worker(plan, first).run())
    finally:
        gc.enable()


class _Connection(asyncio.Protocol):
    """Sends one request at a time and finds the end of its response."""

    __slots__ = ("busy", "due", "head", "remaining", "request", "status", "transport", "worker")

    def __init__(self, worker: _Worker) -> None:
        self.worker = worker
        self.transport: asyncio.Transport | None = None
        self.busy = False
        self.request = 0
        self.due = 0.0
        self.status = LOST
        self.remaining = 0
        self.head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def send(self, request: int, due: float) -> None:
        assert self.transport is not None
        self.busy, self.request, self.due, self.status = True, request, due, LOST
        self.transport.write(self.worker.payloads[request])

    def data_received(self, data: bytes) -> None:
        if self.status == LOST:
            self.head += data
            end = self.head.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.head[:end].lower() + b"\r\n"
            start = head.find(b"\r\ncontent-length:")
            if start < 0:
                raise ValueError(f"a response without Content-Length: {head!r}")
            self.status = int(head[9:12])
            self.remaining = int(head[start + 17 : head.find(b"\r\n", start + 2)]) - (len(self.head) - end - 4)
            self.head = b""
        else:
            self.remaining -= len(data)
        if self.remaining <= 0:
            self.busy = False
            self.worker.finish_request(self, self.status)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self.transport = None
        self.worker.lost(self)


class _Worker:
    """The connections of one process and the queue of requests that are due."""

    def __init__(self, plan: Plan, first: float) -> None:
        self.plan = plan
        self.payloads = [request.payload for request in plan.requests]
        self.first = first
        self.opens = first + plan.settle_s
        self.closes = self.opens + plan.window_s
        self.next = plan.seed * 7919 % len(self.payloads)  # each process starts at another request
        self.rows: list[tuple[int, int, float, float]] = []  # request, status, due, ended
        self.late: list[float] = []
        self.idle: list[_Connection] = []
        self.busy: set[_Connection] = set()
        self.overdue: collections.deque[tuple[int, float]] = collections.deque()
        self.changed = asyncio.Event()

    async def run(self) -> Responses:
        self.idle = [await self.connect() for _ in range(self.plan.connections)]
        await asyncio.sleep(self.first - time.monotonic())
        if self.plan.rate is None:
            for connection in self.idle:
                self.busy.add(connection)
                connection.send(self.take(), time.monotonic())
            self.idle = []
        else:
            arrivals = asyncio.ensure_future(self.arrive(self.plan.rate))
        await asyncio.sleep(self.opens - time.monotonic())
        cpu = time.process_time()
        await asyncio.sleep(self.closes - time.monotonic())
        cores = (time.process_time() - cpu) / self.plan.window_s
        if self.plan.rate is not None:
            await arrivals
        await self.finish()
        columns = list(zip(*self.rows, strict=True)) or [()] * 4
        return Responses(
            request=np.array(columns[0], np.int32),
            status=np.array(columns[1], np.int32),
            due=np.array(columns[2], np.float64),
            ended=np.array(columns[3], np.float64),
            late_s=np.array(self.late, np.float64),
            opened=self.opens,
            client_cores=cores,
            busiest_client=cores,
        )

    async def connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self), self.plan.host, self.plan.port)
        return connection

    async def finish(self) -> None:
        """Wait up to PATIENCE_S for outstanding responses; record the missing ones as NO_RESPONSE."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while self.busy or self.overdue:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            now = time.monotonic()
            self.rows += [(c.request, NO_RESPONSE, c.due, now) for c in self.busy]
            self.rows += [(request, NO_RESPONSE, due, now) for request, due in self.overdue]
        for connection in [*self.busy, *self.idle]:
            if connection.transport is not None:
                connection.transport.abort()

    def take(self) -> int:
        request = self.next
        self.next = (request + 1) % len(self.payloads)
        return request

    async def arrive(self, rate: float) -> None:
        """Send each request when it is due, by its own timer: the loop's timers round to the millisecond."""
        count = int(rate * (self.closes - self.first) * 1.5) + 100
        gaps = np.random.default_rng(self.plan.seed).exponential(1 / rate, count)
        after = (np.arange(count) + self.plan.phase) / rate if self.plan.even else np.cumsum(gaps)
        due = [moment for moment in (self.first + after).tolist() if moment < self.closes]
        timer, done, position = Timer(), asyncio.get_running_loop().create_future(), 0

        def expired() -> None:
            nonlocal position
            timer.read()
            now = time.monotonic()
            while position < len(due) and due[position] <= now:
                self.late.append(now - due[position])
                self.start(self.take(), due[position])
                position += 1
            if position < len(due):
                timer.set(due[position])
            elif not done.done():
                done.set_result(None)

        asyncio.get_running_loop().add_reader(timer.fd, expired)
        timer.set(due[0])
        try:
            await done
        finally:
            asyncio.get_running_loop().remove_reader(timer.fd)
            timer.close()

    def start(self, request: int, due: float) -> None:
        if self.idle:
            connection = self.idle.pop()
            self.busy.add(connection)
            connection.send(request, due)
        else:
            self.overdue.append((request, due))

    def finish_request(self, connection: _Connection, status: int) -> None:
        now = time.monotonic()
        self.rows.append((connection.request, status, connection.due, now))
        if self.overdue:
            connection.send(*self.overdue.popleft())
        elif self.plan.rate is None and now < self.closes:
            connection.send(self.take(), now)
        else:
            self.busy.discard(connection)
            self.idle.append(connection)
            self.changed.set()

    def lost(self, connection: _Connection) -> None:
        """Replace a connection. A server may close an idle one; a request on a busy one counts as lost."""
        if connection in self.idle:
            self.idle.remove(connection)
        elif connection.busy:
            self.busy.discard(connection)
            self.rows.append((connection.request, LOST, connection.due, time.monotonic()))
            self.changed.set()
        if time.monotonic() < self.closes:
            asyncio.ensure_future(self.reconnect())  # noqa: RUF006 - nothing waits for it

    async def reconnect(self) -> None:
        try:
            connection = await self.connect()
        except OSError:
            await asyncio.sleep(0.1)
            return self.lost(_Connection(self))
        if self.plan.rate is None and time.monotonic() < self.closes:
            self.busy.add(connection)
            connection.send(self.take(), time.monotonic())
        elif self.overdue:
            self.busy.add(connection)
            connection.send(*self.overdue.popleft())
        else:
            self.idle.append(connection)
        return None
