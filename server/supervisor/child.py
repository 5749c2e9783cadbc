"""One child process: its start and the pause before that, its control connection, its end."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from embert.engine.host import blas_threads
from embert.server.ipc.control import ControlConnection, Message
from embert.server.observability.logs import DUMP_SIGNAL

HTTP_HANG_S = 30.0  # without an iteration of its event loop
_KILL_WAIT_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0

Kind = Literal["http", "engine"]
_MODULES: dict[Kind, str] = {"http": "embert.server.frontend.process", "engine": "embert.server.engine_worker.process"}


@dataclass(eq=False)
class Child:
    """A process that the supervisor keeps running. Times are seconds of CLOCK_MONOTONIC."""

    kind: Kind
    index: int
    starts: int = 0
    pause_s: float = FIRST_PAUSE_S  # before its next start
    started: float = 0.0
    start_at: float | None = None  # time of its next start
    ready: bool = False
    ready_since: float = float("inf")
    slowest_start_s: float = 0.0  # of the starts that succeeded; 0: none has
    doing: str = ""  # the step of its start that it last reported
    reads: int = -1  # number of the model whose files a starting HTTP process reads; -1: none
    reported: float = 0.0  # time of the last log line about its start
    hang_limit_s: float = HTTP_HANG_S  # longest time without a sign of life, or in one forward
    limits_unknown: bool = True  # no model of this start has reported its batch time
    process: subprocess.Popen[bytes] | None = None
    control: ControlConnection | None = None
    draining: bool = False  # it has got Drain
    killed: bool = False  # it hung; the supervisor has killed it, or is about to, and has not reaped it
    endpoint: str = ""  # Unix socket of this start

    @property
    def name(self) -> str:
        """`http-0`, `engine-1`: in logs and as the name of its metrics files."""
        return f"{self.kind}-{self.index}"

    def spawn(self, inherited: Sequence[int], selector: selectors.BaseSelector) -> None:
        """Start the process with these descriptors, and register the parent's end of its control connection.

        Raises OSError, with nothing left open, if the system has no descriptors, memory or processes left.
        """
        parent_end, child_end = socket.socketpair()
        with child_end:
            try:
                selector.register(parent_end, selectors.EVENT_READ, self)
                self.process = subprocess.Popen(
                    # -P: never import from the working directory
                    [sys.executable, "-P", "-m", _MODULES[self.kind], str(child_end.fileno())],
                    pass_fds=[child_end.fileno(), *inherited],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | blas_threads(),
                    process_group=0,  # Ctrl-C reaches the supervisor only, which then ends the children in order
                )
            except OSError:
                with contextlib.suppress(KeyError):
                    selector.unregister(parent_end)
                parent_end.close()
                raise
        self.control = ControlConnection(parent_end)
        self.starts += 1
        self.ready = self.draining = self.killed = False
        self.ready_since, self.start_at = float("inf"), None
        self.limits_unknown, self.reads = True, -1
        self.started = self.reported = time.monotonic()
        self.doing = "importing modules"

    def send(self, message: Message) -> None:
        if self.control is not None:
            self.control.send(message)

    def became_ready(self) -> None:
        self.ready, self.ready_since = True, time.monotonic()
        self.slowest_start_s = max(self.slowest_start_s, self.ready_since - self.started)

    def start_later(self) -> float:
        """Schedule the next start after a pause, and return the pause in seconds. It doubles with every failure."""
        pause_s, self.pause_s = self.pause_s, min(2 * self.pause_s, LONGEST_PAUSE_S)
        self.start_at = time.monotonic() + pause_s
        return pause_s

    def dump_stacks(self) -> None:
        """Make a hung process log the stacks of its threads, a moment before it is killed."""
        assert self.process is not None  # noqa: S101 - only a running process hangs
        self.ready, self.killed = False, True
        self.process.send_signal(DUMP_SIGNAL)

    def kill(self) -> None:
        """Kill the process if it runs, and wait a few seconds for its end."""
        if self.process is not None:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_KILL_WAIT_S)

    @property
    def connected(self) -> bool:
        """True if this end of the control connection is open."""
        return self.control is not None and self.control.socket.fileno() >= 0

    def disconnect(self, selector: selectors.BaseSelector) -> None:
        """Close this end of the control connection if it is open."""
        if self.control is not None and self.connected:
            selector.unregister(self.control.socket)
            self.control.socket.close()

    def exit_status(self) -> int | None:
        """Exit status of the process; negative: killed by that signal. None if it runs, or there is none."""
        return None if self.process is None else self.process.poll()

    def mark_dead(self) -> None:
        """Forget the process, whose exit status has been read."""
        self.process, self.control, self.ready = None, None, False
