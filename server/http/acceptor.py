"""Accepts connections so that each HTTP process has as many as the others.

All processes share the listening sockets, and each writes the number of its connections into shared memory. A new
connection wakes every process that waits. Those with the fewest connections accept. The others look again after
PAUSE_S.

With SO_REUSEPORT the kernel would choose a process by a hash, which leaves one of eight processes with five of sixteen
connections and another one with none. It would also lose the connections that wait for a process that is killed.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
import time
from collections.abc import Callable, Sequence

from embert.server.http.connections import Connections

PAUSE_S = 0.002  # before a process looks again for connections that it leaves to others
SILENT_S = 0.5  # a process leaves its connections to others after so long, five intervals, without a sign of life
FAILURE_S = 0.1  # before another try after an error, such as no free file descriptor
ACCEPTED_AT_ONCE = 16  # each takes 0.1 ms; requests of other connections go in between
# struct tcp_info: 8 bytes, 4 numbers, and tcpi_unacked, which of a listening socket is the length of its queue.
_QUEUE = struct.Struct("=24xI")


class ConnectionCounts:
    """Numbers of connections of all HTTP processes, in shared memory."""

    def __init__(
        self,
        counts: memoryview[float],
        alive: memoryview[float],
        index: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`counts` has infinity for a process that does not accept; `alive` is when each last showed a sign of life.

        `index` is this process.
        """
        self._counts, self._alive, self._index, self._clock = counts, alive, index, clock

    def set(self, count: float) -> None:
        """Publishes the number of connections of this process, or infinity if it does not accept."""
        self._counts[self._index] = count

    def room(self, own: int, waiting: Callable[[], int]) -> int:
        """Returns how many of the waiting connections this process may accept now, if it has `own`.

        It may have one more than any other process has, or its part of all. `waiting` is called after the counts are
        read, so a connection that another process accepts meanwhile is not counted twice.
        """
        least_alive = self._clock() - SILENT_S
        others = [
            int(count)
            for index, (count, alive) in enumerate(zip(self._counts, self._alive, strict=True))
            if index != self._index and count < math.inf and alive > least_alive
        ]
        if not others:
            return max(1, waiting())
        return max(min(others) + 1, (sum(others) + own + waiting()) // (len(others) + 1)) - own


class Acceptor:
    """Accepts the connections of one process."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        connections: Connections,
        counts: ConnectionCounts,
        make_protocol: Callable[[], asyncio.Protocol],
    ) -> None:
        """`sockets` listen and do not block."""
        self._sockets, self._make_protocol = sockets, make_protocol
        self._connections, self._counts = connections, counts
        self._pending: set[object] = set()  # protocols that are not in `connections` yet
        self._tasks: set[asyncio.Task[None]] = set()  # that connect them
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        self._accepts = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._connections.on_change = self._changed
        self._accept_again()
        for listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def close(self) -> None:
        """Leaves all further connections to other processes."""
        self._accepts = False
        self._publish()
        for listening in self._sockets:
            self._loop.remove_reader(listening)
            listening.close()
        for timer in self._paused.values():
            timer.cancel()
        self._sockets = ()

    async def wait_closed(self) -> None:
        """Returns at once: `close` has no further steps."""

    @property
    def _count(self) -> int:
        return len(self._connections) + len(self._pending)

    def _changed(self, connection: object) -> None:
        self._pending.discard(connection)
        self._publish()

    def _publish(self) -> None:
        self._counts.set(self._count if self._accepts else math.inf)

    def _accept(self, listening: socket.socket) -> None:
        self._publish()
        room = self._counts.room(self._count, lambda: _waiting(listening))
        if room <= 0:
            self._pause(listening, PAUSE_S)
        for _ in range(min(room, ACCEPTED_AT_ONCE)):
            try:
                connection, _ = listening.accept()
            except BlockingIOError:  # another process was faster
                return
            except ConnectionAbortedError:  # the client has left
                continue
            except OSError:
                self._connections.check_files()
                self._accepts = False  # the others need not wait for this process
                self._publish()
                self._pause(listening, FAILURE_S)
                return
            protocol = self._make_protocol()
            self._pending.add(protocol)
            self._publish()
            task = self._loop.create_task(self._connect(connection, protocol))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: socket.socket, protocol: asyncio.Protocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection)
        except OSError:  # the client has left
            connection.close()
        finally:
            self._changed(protocol)

    def _pause(self, listening: socket.socket, seconds: float) -> None:
        self._loop.remove_reader(listening)
        self._paused[listening] = self._loop.call_later(seconds, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        del self._paused[listening]
        self._accept_again()
        self._loop.add_reader(listening, self._accept, listening)

    def _accept_again(self) -> None:
        self._accepts = True
        self._publish()


def _waiting(listening: socket.socket) -> int:
    queue: int = _QUEUE.unpack(listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _QUEUE.size))[0]
    return queue
