"""The process that exports traces, and the socket to it that all children inherit.

Requests do not depend on it. Nothing waits until it is ready, and when it dies, records wait in the socket for the next
one.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable

import msgspec

from embert.server.config import ServeConfig
from embert.server.observability.tracing.records import EXPORTER, ExporterStart
from embert.server.supervisor.child import describe_exit
from embert.server.supervisor.restarts import STABLE_S, Backoff

__all__ = ["TraceExporter"]

log = logging.getLogger(__name__)

FLUSH_S = 5.0  # most seconds that a collector delays the end of the server
_BUFFER_BYTES = 1 << 20  # of records on their way; the system may allow less
_POLL_S = 0.01


class TraceExporter:
    """Keeps the process running."""

    def __init__(self, config: ServeConfig, url: str, memory_fd: int) -> None:
        """`url` is the collector's. Raises OSError where the system has no descriptor left."""
        self._start_message = ExporterStart(
            url=url,
            instance=str(uuid.uuid4()),
            memory_fd=memory_fd,
            log_format=config.log_format,
            log_level=config.log_level,
        )
        # Both ends stay open here: no sender ever finds its socket closed.
        self._records, self._senders = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._senders.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._backoff = Backoff()
        self._started = self._start_at = time.monotonic()

    @property
    def fd(self) -> int:
        """The descriptor on which children send records."""
        return self._senders.fileno()

    def watch(self) -> None:
        """Start the process, also again after its end; to be called periodically."""
        now = time.monotonic()
        if self._process is not None and (status := self._process.poll()) is not None:
            self._process = None
            if now - self._started > STABLE_S:
                self._backoff.reset()
            delay_s = self._backoff.next_s()
            self._start_at = now + delay_s
            log.error("%s %s; starting it again in %.1f s", EXPORTER, describe_exit(status), delay_s)
        if self._process is None and now >= self._start_at:
            self._start(now)

    def _start(self, now: float) -> None:
        self._close_control()
        module = "embert.server.observability.tracing.process"
        try:
            self._control, theirs = socket.socketpair()
            with theirs:
                fds = theirs.fileno(), self._records.fileno()
                inherited = *fds, self._start_message.memory_fd
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, *map(str, fds)],
                    pass_fds=inherited,
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # as all children: Ctrl-C reaches the supervisor only
                )
            self._control.sendall(msgspec.json.encode(self._start_message) + b"\n")
        except OSError as error:
            self._start_at = now + self._backoff.next_s()
            log.error("%s cannot be started: %s", EXPORTER, error)  # noqa: TRY400
        self._started = now

    def close(self, kill_at: Callable[[], float]) -> None:
        """Let the process send what it has, until `kill_at` (CLOCK_MONOTONIC) or for FLUSH_S; no sender may be left."""
        self._close_control()
        until = time.monotonic() + FLUSH_S
        while self._process is not None and self._process.poll() is None:
            if time.monotonic() > min(until, kill_at()):
                log.warning("the collector did not take the last spans in time, they are lost")
                self._process.kill()
                self._process.wait()
            time.sleep(_POLL_S)
        self._records.close()
        self._senders.close()

    def _close_control(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
