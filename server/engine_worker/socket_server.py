"""The engine's Unix socket: HTTP processes connect to it, send requests, and get results and statuses.

The device loop reads requests itself while it has nothing to run and between two batches, and it sends the results:
another thread would have to wake up and acquire the interpreter lock for every message. Before it waits long for the
encoder, it hands the sockets over to the receiving thread, and takes them back by reading again. The reading thread
also sends the rest of messages that an HTTP process did not accept at once. The receiving thread sends the status as
well, and takes over the sockets if the device loop waits longer than expected.
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

from embert.server.ipc.channel import (
    Channel,
    EngineStatus,
    PartialResult,
    Results,
    Submit,
    TextRows,
    address,
    decode_submit,
    encode,
    is_ours,
)

log = logging.getLogger(__name__)

STATUS_INTERVAL_S = 1.0
LINGER_S = 2.0  # maximum time that unsent results delay the end of the process


class SocketServer:
    """Serves the connected HTTP processes, each over a Channel. Any thread may call `send` and `wake`."""

    def __init__(
        self,
        status: Callable[[], EngineStatus],
        received: Callable[[Channel, Submit], None],
        gone: Callable[[Channel], None],
        read: Callable[[], None] = lambda: None,
    ) -> None:
        """The reading thread calls `received` with each message, and `gone` once for each closed connection.

        `status` is called for every outgoing message. A new connection gets a status at once, and every connection
        at least one a second. The receiving thread calls `read` after each time it has read.
        """
        self._status, self._received, self._gone, self._read = status, received, gone, read
        self._lock = threading.Lock()  # guards writes to channels, and their removal
        self._channels: dict[int, Channel] = {}
        self._reading = threading.Lock()  # the reading thread holds it
        self._handed_over = threading.Event()  # the receiving thread should read
        self.is_handed_over = self._handed_over.is_set
        self._ended = False
        self._epoll = select.epoll()
        self._wake = os.eventfd(0)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._run, name="receive", daemon=True)

    def listen(self, name: str) -> None:
        """Accept connections from now on, in the receiving thread. Raises OSError if the name is taken."""
        self._listener.bind(address(name))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._epoll.register(self._listener, select.EPOLLIN)
        self._handed_over.set()
        self._thread.start()

    def serve(self, timeout_s: float) -> bool:
        """Wait for messages for at most `timeout_s`, and handle them. True if there were any, or `wake` was called."""
        if self._ended:
            return False
        while True:
            if self._handed_over.is_set():
                self._handed_over.clear()
                self.wake()
            if self._reading.acquire(timeout=0.01):  # again, as the receiving thread may have just taken over
                break
        try:
            return self._round(timeout_s)
        finally:
            self._reading.release()

    def hand_over(self) -> None:
        """Let the receiving thread read until the next `serve`."""
        self._handed_over.set()

    def wake(self) -> None:
        """End the wait of the reading thread."""
        if not self._ended:
            os.eventfd_write(self._wake, 1)

    def send(self, channel: Channel, parts: list[PartialResult], rows: TextRows | None = None) -> None:
        """Send results, unless the HTTP process has disconnected. Never blocks."""
        message = encode(Results(self._status(), parts, rows))
        with self._lock:
            descriptor = channel.fileno()
            if descriptor >= 0 and not channel.send(message):
                self._epoll.modify(descriptor, select.EPOLLIN | select.EPOLLOUT)

    def close(self) -> None:
        """End the receiving thread and send the remaining results, for at most LINGER_S each."""
        self._ended = True
        self._handed_over.set()
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join(LINGER_S)
        self._listener.close()  # first, so that a disconnected HTTP process cannot connect again
        until = time.monotonic() + LINGER_S
        with self._lock:
            for channel in self._channels.values():
                channel.close(max(0.0, until - time.monotonic()))
            self._channels.clear()
        self._epoll.close()
        os.close(self._wake)

    def _run(self) -> None:
        status_due = 0.0
        while not self._ended:
            self._handed_over.wait(max(0.0, status_due - time.monotonic()))
            if self._reading.acquire(timeout=0.001):  # else the device loop reads
                try:
                    self._handed_over.set()  # unless it is, the device loop waits for longer than it expected
                    has_work = self._round(0.0)
                    self._read()
                    while self._handed_over.is_set() and not self._ended:
                        has_work |= self._round(max(0.0, status_due - time.monotonic()))
                        self._read()
                        status_due = self._send_status(status_due)
                finally:
                    self._reading.release()
                if has_work:
                    self.wake()  # the device loop may have looked for work before
            status_due = self._send_status(status_due)

    def _send_status(self, due: float) -> float:
        """Send the status to all HTTP processes if it is due. Returns the time when it is due again."""
        now = time.monotonic()
        if now < due:
            return due
        if not self._channels:
            self._status()  # also a sign of life for the supervisor
        for channel in list(self._channels.values()):
            self.send(channel, [])
        return now + STATUS_INTERVAL_S

    def _round(self, timeout_s: float) -> bool:
        ready = self._epoll.poll(timeout_s)
        for descriptor, events in ready:
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif descriptor == self._listener.fileno():
                self._accept()
            else:
                self._serve(self._channels[descriptor], events)
        return bool(ready)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # the peer disconnected again, or this process has too many open files
            log.warning("an HTTP process could not connect: %s", error)
            return
        if not is_ours(sock):
            log.error("closed a connection from another user's process")
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
            log.error("closed a connection that is not from an HTTP process: %s", error)  # noqa: TRY400
            self._forget(channel)
        else:
            for submit in submits:
                self._received(channel, submit)

    def _forget(self, channel: Channel) -> None:
        with self._lock:
            del self._channels[channel.fileno()]
            channel.close()  # which removes it from epoll
        self._gone(channel)
