"""The engine process's side of its Unix socket: API processes connect, ask, and get answers and statuses.

Requests are taken by a thread of their own. Answers are sent by the thread that has them: one between would have to be
woken, and to ask for the interpreter's lock, for every batch. What an API process does not take at once is left to the
receiving thread.
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

from embert.server.ipc.framing import Channel, short_path
from embert.server.ipc.messages import EngineStatus, Part, Results, Submit, decode_submit, encode

__all__ = ["SocketServer"]

log = logging.getLogger(__name__)

STATUS_INTERVAL_S = 1.0
LINGER_S = 2.0  # how long unsent answers may hold up the end of the process


class SocketServer:
    """The API processes that are connected, each a Channel. `send` may be called by any thread."""

    def __init__(
        self,
        status: Callable[[], EngineStatus],
        received: Callable[[Channel, Submit], None],
        gone: Callable[[Channel], None],
    ) -> None:
        """`received` and `gone` are called by the receiving thread; `status` for every message, and every second.

        Who connects gets a status at once, and then at least one every second.
        """
        self._status, self._received, self._gone = status, received, gone
        self._lock = threading.Lock()  # guards what is written, and by whom
        self._channels: dict[int, Channel] = {}
        self._epoll = select.epoll()
        self._end = os.eventfd(0)
        self._epoll.register(self._end, select.EPOLLIN)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._run, name="receive", daemon=True)

    def listen(self, path: str) -> None:
        """Take connections from now on."""
        with short_path(path) as short:
            self._listener.bind(short)
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._epoll.register(self._listener, select.EPOLLIN)
        self._thread.start()

    def send(self, channel: Channel, parts: list[Part]) -> None:
        """Send answers, unless the API process is gone. Never blocks."""
        message = encode(Results(self._status(), parts))
        with self._lock:
            descriptor = channel.fileno()
            if descriptor >= 0 and not channel.send(message):
                self._epoll.modify(descriptor, select.EPOLLIN | select.EPOLLOUT)

    def close(self) -> None:
        """Send what is left and end the receiving thread."""
        os.eventfd_write(self._end, 1)
        if self._thread.is_alive():
            self._thread.join(LINGER_S)
        self._listener.close()  # first: who is disconnected must not connect again
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
                    self._status()  # which is a sign of life, too
                for channel in list(self._channels.values()):
                    self.send(channel, [])

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # it left again, or this process has too many files open
            log.warning("an API process could not connect: %s", error)
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
            channel.close()  # which epoll notices
        self._gone(channel)
