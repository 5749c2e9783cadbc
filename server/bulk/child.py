"""The processes of a run, as the command's own process sees them, and what they say to each other."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, Literal

from embert.engine import Model
from embert.engine.int8_accuracy import MIN_ACCURACY
from embert.server.bulk.job import BulkError, Job
from embert.server.bulk.output.place import Place
from embert.server.bulk.slots import Block

__all__ = ["Child", "Failed", "Progress", "Ready", "Start"]

_MODULE = "embert.server.bulk.process"
_WAIT_S = 10.0  # for a process that was killed


@dataclass(frozen=True, slots=True)
class Start:
    """To a child, first of all. Later messages are blocks: for a text process with the name of what to do."""

    kind: Literal["text", "engine"]
    job: Job
    model: Model
    slots: tuple[int, ...]  # descriptors
    path: list[str]  # sys.path, so that an encoder of one's own is found
    device: str = "cpu"
    dtype: str = "auto"
    encoder: str = "auto"
    min_agreement: float = MIN_ACCURACY


@dataclass(frozen=True, slots=True)
class Ready:
    """From a child: it waits for blocks. An engine says what it is."""

    encoder: str = ""
    device: str = ""
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """From a child: the run cannot go on, for a reason that is one sentence."""

    message: str


@dataclass(frozen=True, slots=True)
class Progress:
    """From an engine: so many more texts are encoded."""

    texts: int


class Child:
    """One process. It ends when this end of its connection closes, however that comes about."""

    def __init__(self, name: str, start: Start, environment: dict[str, str]) -> None:
        """Start it. `name` is for people. Raises OSError."""
        self.name = name
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # -P: never import from the working directory
                [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *start.slots],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is for vectors
                env=os.environ | environment,
                process_group=0,  # Ctrl-C reaches the command's own process only, which then ends the others
            )
        self._connection = Connection(ours.detach())
        self.send(start)

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def send(self, *message: Any) -> None:
        """Send a message. One to a process that has ended is dropped: `receive` says so."""
        with contextlib.suppress(OSError):
            self._connection.send(message if len(message) > 1 else message[0])

    def send_write(self, block: Block, place: Place) -> None:
        """Have a text process write a block. The file goes with the order, so it is open there as long as that lasts.

        With it goes the file's lock: it is held as long as somebody may write.
        """
        with contextlib.suppress(OSError):
            self._connection.send(("write", block, place))
            reduction.send_handle(self._connection, place.descriptor, self.pid)

    def receive(self) -> Any:
        """Wait for the next message. Raises BulkError where the process fails or has ended."""
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            raise BulkError(f"{self.name} {self._end()}") from None
        if isinstance(message, Failed):
            raise BulkError(message.message)
        return message

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()

    def wait(self) -> None:
        """Wait until it has ended, and close the connection."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_WAIT_S)
        self._connection.close()

    def _end(self) -> str:
        """How the process ended."""
        try:
            status = self._process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            return "does not answer"
        if status >= 0:
            return f"ended with status {status}"
        with contextlib.suppress(ValueError):
            number = signal.Signals(-status)
            memory = "; perhaps memory ran out" if number == signal.SIGKILL else ""
            return f"was killed by {number.name}{memory}"
        return f"was killed by signal {-status}"
