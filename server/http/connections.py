"""Limits the connections of an HTTP process, and closes idle ones for new ones.

Every connection holds a file descriptor, and a process without a free one cannot accept. So one always stays free: idle
connections are closed for new ones, and connections above the limit are refused within a bounded time.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import resource
import select
import sys
import termios
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain, takewhile
from pathlib import Path
from typing import NoReturn, Protocol

from embert.server.http.held_bytes import HeldBytes

log = logging.getLogger(__name__)

SPARE_FILES = 64  # descriptors opened later for other uses: engines, metrics, files of the docs
MOST_SURPLUS = 1024  # connections above the limit that are refused at the same time; others are closed
WATCH_INTERVAL_S = 0.25
LOG_INTERVAL_S = 10.0  # between two lines of a kind
EVICTED_WITHOUT_FILES = 8  # idle connections closed at once when no descriptor is left
LEAST_TAKEN = 16_384  # bytes of a response that a client must read in --client-timeout
LEAST_TAKEN_PER_S = 32_768  # bytes a second, if memory is scarce


class ConnectionSlot(Enum):
    """Treatment of a new connection."""

    SERVED = auto()
    SURPLUS = auto()  # its requests are refused, probes excepted, and it ends soon
    NONE = auto()


@dataclass(frozen=True, slots=True)
class ConnectionLimit:
    """Limits of one process."""

    served: int
    surplus: int


def connection_limit(limit: int) -> ConnectionLimit:
    """Raises this process's limit of open files to the hard limit. Returns the connections that it allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return ConnectionLimit(limit, MOST_SURPLUS)
    available = max(2, hard - sum(1 for _ in Path("/proc/self/fd").iterdir()) - SPARE_FILES)
    most = min(limit, available - max(1, min(available // 8, MOST_SURPLUS)))
    return ConnectionLimit(most, min(available - most, MOST_SURPLUS))


class Connection(Protocol):
    """A connection that is counted."""

    transport: asyncio.Transport

    def evict(self) -> bool:
        """Close it while it is idle. False when it has to stay."""
        ...

    def count_unread(self) -> None:
        """Note what it holds now; see HeldBytes."""
        ...

    def shutdown(self) -> None:
        """Closes it after the response in progress, or now."""
        ...


class Connections:
    """All connections of one process, of all its ports."""

    def __init__(self, limit: ConnectionLimit, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """A connection without a request for `idle_s` is closed, even if other bytes come."""
        self.limit = limit
        self._idle_s = idle_s
        self._served: set[Connection] = set()
        self._surplus: set[Connection] = set()
        self._idle: dict[Connection, float] = {}  # of those served, since when; the longest idle first
        self.unread: set[Connection] = set()  # read no further before a response: the event loop does not see their end
        self.on_change: Callable[[Connection], object] = id  # called after one is added or removed
        self.draining = False  # the next response of each connection is its last
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}  # kind → time of its last line, how many were suppressed since

    def __len__(self) -> int:
        return len(self._served) + len(self._surplus)

    def __iter__(self) -> Iterator[Connection]:
        return chain(self._served, self._surplus)

    def add(self, connection: Connection) -> ConnectionSlot:
        """Count a new one; at the limit, close the one that has been idle for longest."""
        if len(self._served) < self.limit.served or self.evict():
            self._served.add(connection)
            self.on_change(connection)
            return ConnectionSlot.SERVED
        if len(self._surplus) < self.limit.surplus:
            self._surplus.add(connection)
            self.on_change(connection)
            return ConnectionSlot.SURPLUS
        self._log("connections closed without a response: %d are being refused, the most at a time", self.limit.surplus)
        return ConnectionSlot.NONE

    def remove(self, connection: Connection) -> None:
        self._served.discard(connection)
        self._surplus.discard(connection)
        self._idle.pop(connection, None)
        self.unread.discard(connection)
        self.on_change(connection)

    def drain(self) -> None:
        """Ends all connections: idle ones now, others and new ones with their next response."""
        self.draining = True
        for connection in list(self):
            connection.shutdown()

    @property
    def unread_responses(self) -> int:
        """Number of connections with bytes of a response that are not in the kernel yet."""
        return sum(1 for connection in self if connection.transport.get_write_buffer_size())

    def mark_idle(self, connection: Connection) -> None:
        """Note that it has nothing to do until its client sends something."""
        if connection in self._served:
            self._idle.setdefault(connection, self._clock())

    def mark_busy(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def evict(self) -> bool:
        """Close the one that has been idle for longest; False where none can be closed."""
        oldest = next((connection for connection in self._idle if connection.evict()), None)
        if oldest is None:
            return False
        self.remove(oldest)
        return True

    def check_unread(self) -> None:
        """Aborts what is read no further if its client has left. Elsewhere, too, one that closes its side has left."""
        poll, by_file = select.poll(), {}
        for connection in self.unread:
            file = connection.transport.get_extra_info("socket").fileno()
            if file >= 0:  # else it is closing
                by_file[file] = connection
                poll.register(file, select.POLLRDHUP)
        for file, _ in poll.poll(0):
            by_file[file].transport.abort()

    async def watch(self) -> NoReturn:
        """Runs all checks periodically, for ever.

        One sweep replaces a timer for each connection, which every request would set and cancel.
        """
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if self.unread:
                self.check_unread()
            self.close_idle()
            self.check_files()

    def close_idle(self) -> None:
        due = self._clock() - self._idle_s
        for connection, _ in takewhile(lambda item: item[1] <= due, list(self._idle.items())):
            connection.transport.close()

    def check_files(self) -> None:
        """Closes idle connections, and logs it, when no file can be opened.

        libuv silently closes connections to --metrics-port that it cannot accept: only opening a file shows it.
        """
        try:
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            evicted = sum(self.evict() for _ in range(EVICTED_WITHOUT_FILES))
            self._log("no file can be opened (%s), new connections fail; idle ones closed: %d", error.strerror, evicted)

    def _log(self, line: str, *values: object) -> None:
        last, repeats = self._logged.get(line, (-LOG_INTERVAL_S, 0))
        now = self._clock()
        if now - last < LOG_INTERVAL_S:
            self._logged[line] = last, repeats + 1
            return
        self._logged[line] = now, 0
        log.warning(line + " (and %d times since the last such line)", *values, repeats)


def unread_bytes(connection: Connection) -> int:
    """Bytes of a response that the client's machine has not taken; 0 if all of it is in the kernel.

    The kernel holds megabytes. Without them, the number would stand still for long while a client reads steadily.
    """
    size = connection.transport.get_write_buffer_size()
    if not size or (file := connection.transport.get_extra_info("socket").fileno()) < 0:
        return size
    return size + int.from_bytes(fcntl.ioctl(file, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


async def end_slow_readers(
    connections: Iterable[Connection], held: HeldBytes, timeout_s: float, on_end: Callable[[], None]
) -> NoReturn:
    """Aborts connections whose client has read fewer than LEAST_TAKEN bytes of its response in `timeout_s`; for ever.

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
