"""The engine's Unix socket: API processes connect to it, send requests, and get answers and statuses.

A receiving thread reads the requests. The device loop sends its answers itself: a sending thread would have to wake up
and acquire the interpreter lock for every batch. What an API process does not accept at once, the receiving thread
sends later.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from embert.server.ipc.framing import Channel, address, is_ours
from embert.server.ipc.messages import EngineStatus, Part, Results, Submit, decode_submit, encode

__all__ = ["SocketServer"]

log = logging.getLogger(__name__)

STATUS_INTERVAL_S = 1.0
LINGER_S = 2.0  # most seconds that unsent answers delay the end of the process


class SocketServer:
    """Serves the connected API processes, each over a Channel. Any thread may call `send`."""

    def __init__(
        self,
        status: Callable[[], EngineStatus],
        received: Callable[[Channel, Submit], None],
        gone: Callable[[Channel], None],
    ) -> None:
        """The receiving thread calls `received` with each message, and `gone` once for each closed connection.

        `status` is called for every message that is sent. A new connection gets a status at once, and every connection
        at least one a second.
        """
        self._status, self._received, self._gone = status, received, gone
        self._lock = threading.Lock()  # guards writes to channels, and their removal
        self._channels: dict[int, Channel] = {}
        self._epoll = select.epoll()
        self._end = os.eventfd(0)
        self._epoll.register(self._end, select.EPOLLIN)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._run, name="receive", daemon=True)

    def listen(self, name: str) -> None:
        """Accept connections from now on. Raises OSError where the name is taken."""
        self._listener.bind(address(name))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._epoll.register(self._listener, select.EPOLLIN)
        self._thread.start()

    def send(self, channel: Channel, parts: list[Part]) -> None:
        """Send answers, unless the API process has disconnected. Never blocks."""
        message = encode(Results(self._status(), parts))
        with self._lock:
            descriptor = channel.fileno()
            if descriptor >= 0 and not channel.send(message):
                self._epoll.modify(descriptor, select.EPOLLIN | select.EPOLLOUT)

    def close(self) -> None:
        """End the receiving thread and send the remaining answers, for at most LINGER_S each."""
        os.eventfd_write(self._end, 1)
        if self._thread.is_alive():
            self._thread.join(LINGER_S)
        self._listener.close()  # first, so that a disconnected API process cannot connect again
        until = time.monotonic() + LINGER_S
        with self._lock:
            for channel in self._channels.values():
                channel.close(max(0.0, until - time.monotonic()))
            self._channels.clear()
        self._epoll.close()
        os.close(self._end)

    def _run(self) -> None:
        status_due = 0.0
        while True:
            wait_s = max(0.0, status_due - time.monotonic())
            for descriptor, events in self._epoll.poll(wait_s):
                if descriptor == self._end:
                    return
                if descriptor == self._listener.fileno():
                    self._accept()
                else:
                    self._serve(self._channels[descriptor], events)
            if time.monotonic() >= status_due:
                status_due = time.monotonic() + STATUS_INTERVAL_S
                if not self._channels:
                    self._status()  # also a sign of life, which the supervisor wants
                for channel in list(self._channels.values()):
                    self.send(channel, [])

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # the peer disconnected again, or this process has too many open files
            log.warning("an API process could not connect: %s", error)
            return
        if not is_ours(sock):
            log.error("a connection of another user's process was closed")
            sock.close()
            return
        channel = Channel(sock)
        self._channels[channel.fileno()] = channel
        self._epoll.register(channel.fileno(), select.EPOLLIN)
        self.send(channel, [])

    def _serve(self, channel: Channel, events: int) -> None:
        if events & select.EPOLLOUT:
            with self._lock:
                if channel.flush():
                    self._epoll.modify(channel.fileno(), select.EPOLLIN)
        if not events & ~select.EPOLLOUT:
            return
        try:
            submits = [decode_submit(message) for message in channel.receive()]
        except EOFError:
            self._forget(channel)
        except (ValueError, msgspec.MsgspecError) as error:
            log.error("a connection that is no API process's was closed: %s", error)  # noqa: TRY400
            self._forget(channel)
        else:
            for submit in submits:
                self._received(channel, submit)

    def _forget(self, channel: Channel) -> None:
        with self._lock:
            del self._channels[channel.fileno()]
            channel.close()  # which removes it from epoll
        self._gone(channel)
