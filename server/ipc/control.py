"""The line between the supervisor and one child: JSON lines over a socket pair.

The end of the stream is information too: the other side is gone, so a child never outlives its supervisor.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec

from embert.server.config import ServeConfig

__all__ = [
    "Drain",
    "EngineInfo",
    "EngineState",
    "Failed",
    "Line",
    "Message",
    "Progress",
    "Ready",
    "StartApi",
    "StartEngine",
]


class EngineInfo(msgspec.Struct, frozen=True):
    """What an engine process says of itself once it can work."""

    encoder: str
    device: str
    device_name: str
    dtype: str
    choice: str  # why this encoder and device
    max_batch_tokens: int
    width: int
    hidden_size: int
    load_s: float
    full_batch_s: float  # how long the largest batch takes


class EngineState(msgspec.Struct, tag=True, frozen=True):
    """Supervisor → API process: what has become of engine `index`."""

    index: int
    state: str  # "loading", "ready", "down"
    detail: str = ""
    endpoint: str = ""  # the Unix socket where this start of the engine takes requests; new at every start
    info: EngineInfo | None = None


class StartApi(msgspec.Struct, tag=True):
    """Supervisor → API process, first line."""

    config: ServeConfig
    folder: str
    model_id: str
    model_revision: str | None
    runtime_folder: str
    socket_fds: list[int]
    metrics_fd: int | None
    worker: int
    board_fd: int
    engines: list[EngineState]


class StartEngine(msgspec.Struct, tag=True):
    """Supervisor → engine process, first line."""

    config: ServeConfig
    folder: str
    model_id: str
    runtime_folder: str
    index: int
    device: str
    endpoint: str
    board_fd: int
    engines: int  # of the server


class Progress(msgspec.Struct, tag=True):
    """Child → supervisor: what it does before it is ready, for people who wait."""

    doing: str


class Ready(msgspec.Struct, tag=True):
    """Child → supervisor: it can work; `info` from engines only."""

    info: EngineInfo | None = None


class Failed(msgspec.Struct, tag=True):
    """Child → supervisor: it cannot start, and a new try would end the same way."""

    message: str


class Drain(msgspec.Struct, tag=True):
    """Supervisor → child: take no new requests, finish those in flight, then leave."""


Message = EngineState | StartApi | StartEngine | Progress | Ready | Failed | Drain
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class Line:
    """One end of the line. Reading blocks unless the socket is set otherwise; sending to a dead peer is ignored."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._buffer = b""

    @classmethod
    def from_fd(cls, fd: int) -> Line:
        """The child's end, inherited as descriptor `fd`."""
        return cls(socket.socket(fileno=fd))

    def send(self, message: Message) -> None:
        """Send one message, unless the other side is gone (which the reader will see)."""
        try:
            self.socket.sendall(_encoder.encode(message) + b"\n")
        except OSError:
            return

    def receive(self) -> Message | None:
        """Block for the next message; None when the other side is gone."""
        while b"\n" not in self._buffer:
            if not self._fill():
                return None
        head, _, self._buffer = self._buffer.partition(b"\n")
        return _decoder.decode(head)

    def drain(self) -> Iterator[Message | None]:
        """What is there after the socket became readable; ends with None when the other side is gone."""
        alive = self._fill()
        yield from self.buffered()
        if not alive:
            yield None

    def buffered(self) -> Iterator[Message]:
        """What was read along with earlier messages; waiting for the socket would miss it."""
        while b"\n" in self._buffer:
            head, _, self._buffer = self._buffer.partition(b"\n")
            yield _decoder.decode(head)

    def _fill(self) -> bool:
        try:
            data = self.socket.recv(65536)
        except OSError:
            return False
        self._buffer += data
        return bool(data)
