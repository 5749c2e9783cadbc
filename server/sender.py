"""The engine process's sending thread: answers and statuses, one ZeroMQ message a batch and API process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

import zmq

from server.messages import Part, Results, Status, encode

__all__ = ["Sender"]

STATUS_INTERVAL_S = 1.0
LINGER_MS = 2000  # how long unsent answers may hold up the end of the process


class Sender:
    """Takes work from any thread; only its own thread touches the sockets."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], status: Callable[[], Status]) -> None:
        """`status` is asked for every message, and every second for one without answers."""
        self._context, self._status = context, status
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._outputs: dict[str, zmq.Socket[bytes]] = {}
        self._thread = threading.Thread(target=self._run, name="send", daemon=True)
        self._thread.start()

    def connect(self, endpoint: str) -> None:
        """Make an API process known, which gets a status at once; does nothing when it is known."""
        self._work.put(lambda: self._connect(endpoint))

    def send(self, endpoint: str, parts: list[Part]) -> None:
        """Send answers, unless the API process is gone."""
        self._work.put(lambda: self._send(endpoint, parts))

    def forget(self, endpoint: str) -> None:
        """Drop an API process that is gone, with what was not sent yet."""
        self._work.put(lambda: self._forget(endpoint))

    def close(self) -> None:
        """Send everything, close the sockets and end the context, which ends blocking calls on its other sockets."""
        self._work.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        next_status = time.monotonic() + STATUS_INTERVAL_S
        while True:
            try:
                work = self._work.get(timeout=max(0.0, next_status - time.monotonic()))
            except Empty:
                next_status = time.monotonic() + STATUS_INTERVAL_S
                for endpoint in self._outputs:
                    self._send(endpoint, [])
                continue
            if work is None:
                break
            work()
        for socket in self._outputs.values():
            socket.close(linger=LINGER_MS)
        self._context.term()

    def _connect(self, endpoint: str) -> None:
        if endpoint in self._outputs:
            return
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.connect(endpoint)
        self._outputs[endpoint] = socket
        self._send(endpoint, [])

    def _send(self, endpoint: str, parts: list[Part]) -> None:
        socket = self._outputs.get(endpoint)
        if socket is not None:
            socket.send(encode(Results(self._status(), parts)))

    def _forget(self, endpoint: str) -> None:
        socket = self._outputs.pop(endpoint, None)
        if socket is not None:
            socket.close(linger=0)
