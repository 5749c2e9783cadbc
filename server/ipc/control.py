"""The control connection between the supervisor and one child: JSON lines over a socket pair.

The end of the stream carries information too: the other process has exited. So a child never outlives its supervisor.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from typing import Literal

import msgspec

from embert.engine.tasks import NO_SHARING, Sharing
from embert.server.config import ModelConfig, ServeConfig


class ModelInfo(msgspec.Struct, frozen=True):
    """Properties of a model that is ready in an engine process."""

    encoder: str
    device: str
    device_name: str
    dtype: str
    choice: str  # why this encoder and device
    max_batch_tokens: int
    width: int
    hidden_size: int
    load_s: float
    full_batch_s: float  # duration of a batch of short texts that fill the token budget
    longest_text_s: float  # expected duration of the longest text
    sharing: Sharing = NO_SHARING


class ModelState(msgspec.Struct, frozen=True):
    """A model in one engine process."""

    state: Literal["loading", "ready", "failed"]
    detail: str = ""
    info: ModelInfo | None = None


class EngineState(msgspec.Struct, tag=True, frozen=True):
    """Supervisor → HTTP process: the state of engine `index`, or of a model there, has changed."""

    index: int
    state: Literal["loading", "ready", "down"]  # ready: a model is
    detail: str = ""
    endpoint: str = ""  # name of the socket that takes requests; new at every start of the engine
    models: dict[int, ModelState] = {}  # by number: those that the engine has or will load


class StartModel(msgspec.Struct, frozen=True):
    """A model of the server. Its number is its index among them."""

    number: int
    config: ModelConfig
    folder: str
    model_id: str
    revision: str | None = None

    @property
    def name(self) -> str:
        return self.config.served_name(self.model_id)


class StartHttp(msgspec.Struct, tag=True):
    """Supervisor → HTTP process, first message."""

    config: ServeConfig
    models: list[StartModel]
    broken: dict[str, str]  # configured models that cannot be read: name → reason
    memory_fd: int  # of metrics
    socket_fds: list[int]
    metrics_fd: int | None
    http_index: int
    counters_fd: int
    engines: list[EngineState]
    traces_url: str | None = None  # of the collector; None: no traces
    instance: str = ""  # a unique name of this server


class StartEngine(msgspec.Struct, tag=True):
    """Supervisor → engine process, first message."""

    config: ServeConfig
    models: list[StartModel]  # to load
    one_by_one: bool  # not in parallel: the last process was lost while it loaded, and the model at fault is unknown
    names: list[str]  # of all models of the server, by number
    memory_fd: int  # of metrics
    index: int
    device: str
    endpoint: str
    counters_fd: int
    engines: int  # number of engines in the server
    traces_url: str | None = None  # see StartHttp
    instance: str = ""


class LoadModel(msgspec.Struct, tag=True):
    """Supervisor → engine process, later: load one more model."""

    model: StartModel


class Progress(msgspec.Struct, tag=True):
    """Child → supervisor: the current step of its start, for logs."""

    doing: str
    model: int = -1  # number of the model that it loads or reads; -1: none


class ModelReady(msgspec.Struct, tag=True):
    """Engine → supervisor: a model is loaded and has run. The first one makes the engine ready."""

    model: int
    info: ModelInfo


class ModelFailed(msgspec.Struct, tag=True):
    """Child → supervisor: a model cannot be loaded or read, and a retry would fail in the same way."""

    model: int
    message: str


class Ready(msgspec.Struct, tag=True):
    """HTTP process → supervisor: it is ready to work."""


class Failed(msgspec.Struct, tag=True):
    """HTTP process → supervisor: it cannot start, and a retry would fail in the same way."""

    message: str


class Drained(msgspec.Struct, tag=True):
    """HTTP process → supervisor, last message: the outcomes of requests for a model since it began to drain."""

    answered: int  # with a response
    refused: int
    lost: int  # without a response, or not read before the connection was cut


class Drain(msgspec.Struct, tag=True):
    """Supervisor → child: refuse new requests, finish those in flight, then exit."""


class Reload(msgspec.Struct, tag=True):
    """Supervisor → HTTP process: read keys and certificates again."""


Message = (
    EngineState | StartHttp | StartEngine | LoadModel | Progress | ModelReady | ModelFailed | Ready | Failed | Drain
    | Drained | Reload
)  # fmt: skip
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class ControlConnection:
    """One end. Reading blocks unless the socket is non-blocking; a message to a dead peer is dropped."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._buffer = b""
        self._sending = threading.Lock()  # several threads of an engine report

    @classmethod
    def from_fd(cls, fd: int) -> ControlConnection:
        """The child's end, inherited as descriptor `fd`."""
        return cls(socket.socket(fileno=fd))

    def send(self, message: Message) -> None:
        """Send one message. It is dropped if the peer has exited; the reader sees the end of the stream."""
        try:
            with self._sending:
                self.socket.sendall(_encoder.encode(message) + b"\n")
        except OSError:
            return

    def receive(self) -> Message | None:
        """Wait for the next message; None at the end of the stream."""
        while b"\n" not in self._buffer:
            if not self._fill():
                return None
        head, _, self._buffer = self._buffer.partition(b"\n")
        return _decoder.decode(head)

    def drain(self) -> Iterator[Message | None]:
        """Messages available after the socket became readable; the last item is None at the end of the stream."""
        alive = self._fill()
        yield from self.buffered()
        if not alive:
            yield None

    def buffered(self) -> Iterator[Message]:
        """Messages already read together with earlier ones; the socket does not become readable for them again."""
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


def describe_exit(status: int) -> str:
    """`was killed by SIGKILL`, `ended with status 1`."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # most real-time signals have no name
        return f"was killed by signal {-status}"
