"""The engine process's way out: answers and statuses, one ZeroMQ message a batch and API process.

Sent by the thread that has them: a send only hands the message to ZeroMQ's own thread, and a thread of ours between
them would be one more to be woken, and to ask for the interpreter's lock, for every batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import zmq

from server.messages import Part, Results, Status, encode

__all__ = ["Sender"]

STATUS_INTERVAL_S = 1.0
LINGER_MS = 2000  # how long unsent answers may hold up the end of the process
END_S = 5.0  # ... and whatever else keeps ZeroMQ from ending


class Sender:
    """Sends from any thread, one at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], status: Callable[[], Status]) -> None:
        """`status` is asked for every message, and every second for one without answers."""
        self._context, self._status = context, status
        self._lock = threading.Lock()  # guards the sockets
        self._outputs: dict[str, zmq.Socket[bytes]] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="status", daemon=True).start()

    def connect(self, endpoint: str) -> None:
        """Make an API process known, which gets a status at once; does nothing when it is known."""
        if endpoint in self._outputs:
            return
        with self._lock:
            if self._closed.is_set() or endpoint in self._outputs:
                return
            socket: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
            socket.set_hwm(0)
            socket.connect(endpoint)
            self._outputs[endpoint] = socket
            self._send(endpoint, [])

    def send(self, endpoint: str, parts: list[Part]) -> None:
        """Send answers, unless the API process is gone. Never blocks: ZeroMQ holds what a peer does not take."""
        with self._lock:
            self._send(endpoint, parts)

    def forget(self, endpoint: str) -> None:
        """Drop an API process that is gone, with what was not sent yet."""
        with self._lock:
            socket = self._outputs.pop(endpoint, None)
            if socket is not None:
                socket.close(linger=0)

    def close(self) -> None:
        """Send everything, close the sockets and end the context, which ends blocking calls on its other sockets."""
        with self._lock:
            self._closed.set()
            for socket in self._outputs.values():
                socket.close(linger=LINGER_MS)
            self._outputs.clear()
        ending = threading.Thread(target=self._context.term, daemon=True)
        ending.start()
        ending.join(END_S)

    def _run(self) -> None:
        while not self._closed.wait(STATUS_INTERVAL_S):
            with self._lock:
                for endpoint in self._outputs:
                    self._send(endpoint, [])

    def _send(self, endpoint: str, parts: list[Part]) -> None:
        socket = self._outputs.get(endpoint)
        if socket is not None:
            socket.send(encode(Results(self._status(), parts)))
