"""`embert serve`: binds the port, starts the processes, watches them, starts them again, and ends them in order.

supervisor ── line ── API process 0 … N-1     each has a socket of the port, which stays open while it restarts
           └─ line ── engine process 0 … G-1  one per device; each start has a Unix socket of its own
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from embert import __version__
from embert.engine import Model
from embert.server.config import ConfigError, ServeConfig
from embert.server.ipc.control import (
    ControlConnection,
    Drain,
    EngineState,
    Failed,
    Message,
    Progress,
    Ready,
    StartApi,
    StartEngine,
)
from embert.server.ipc.shared_counters import SharedCounters
from embert.server.observability.metrics import forget_process, use_folder

if TYPE_CHECKING:
    from embert.server.observability.metrics import SupervisorMetrics

__all__ = ["Supervisor", "listen", "listen_for_each"]

log = logging.getLogger(__name__)

BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.1, 10.0
FIRST_STARTS = 3  # a child that dies this often before the server was ever ready will not come up
LIVED_WELL_S = 2.0  # after being ready for so long, a new failure is a first failure
PROGRESS_REPORTS = 10  # at most so many lines tell of a start, evenly over --start-timeout
FAREWELL_S = 5.0  # for clients to get their 503 when we give up
UNKILLABLE_S = 10.0  # a process that a driver or a file system holds does not die; we leave without it
WATCH_INTERVAL_S = 0.5
HANG_MIN_S, HANG_BATCHES = 5.0, 100  # a forward hangs after so many full batches' time, but not before 5 s
SIGN_INTERVALS_S = 2.0  # signs of life come every second
API_HANG_S = 30.0  # ... and an HTTP process whose loop has not run for so long
SAME_SIGNAL_S = 0.5  # `timeout` and shells signal the process and then its group: one wish, told twice
_BACKLOG = 4096


def listen(host: str, port: int, option: str = "--port", *, shared: bool = False) -> list[socket.socket]:
    """Open the port, on every address `host` means; `shared` with others of this user that say so.

    Raises ConfigError with one sentence, which names `option`.
    """
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error}") from None
    sockets: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(addresses):
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            sock.bind((address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:]))
            sock.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} port {port}: {error.strerror}; choose another with {option}"
            ) from None
        sock.set_inheritable(True)
        sockets.append(sock)
    return sockets


def listen_for_each(host: str, port: int, processes: int) -> list[list[socket.socket]]:
    """The same port for every process, by sockets of its own: the kernel spreads the connections over them.

    Of one socket that all share, the process that happens to be awake takes most. Raises ConfigError as `listen` does.
    """
    sockets = listen(host, port)  # not shared, so that it fails where another server has the port
    if processes == 1:
        return [sockets]
    found: int = sockets[0].getsockname()[1]
    for sock in sockets:
        sock.close()
    return [listen(host, found, shared=True) for _ in range(processes)]


@dataclass(eq=False)
class _Child:
    """A process to keep alive."""

    name: str
    module: str
    index: int
    starts: int = 0
    backoff_s: float = BACKOFF_FIRST_S
    started: float = 0.0
    start_at: float | None = None  # when to start it (again)
    ready_since: float = float("inf")
    slowest_start_s: float = 0.0  # of those that succeeded; 0: none has
    doing: str = ""  # what it last said of its start
    reported: float = 0.0  # when the log last told of its start
    patience_s: float = API_HANG_S  # without a sign of life, or with one forward
    process: subprocess.Popen[bytes] | None = None
    control: ControlConnection | None = None
    ready: bool = False
    killed: bool = False  # by us, and not yet dead
    endpoint: str = ""  # of this start


@dataclass(eq=False)
class Supervisor:
    """Owns the children. `run` returns the exit status."""

    config: ServeConfig
    model: Model
    devices: list[str]
    sockets: list[list[socket.socket]]  # of each API process
    metrics_socket: socket.socket | None
    began: float
    _folder: Path = field(init=False)
    _apis: list[_Child] = field(init=False)
    _engines: list[_Child] = field(init=False)
    _states: list[EngineState] = field(init=False)
    _metrics: SupervisorMetrics = field(init=False)
    _counters: SharedCounters = field(init=False)
    _down_since: dict[str, float] = field(default_factory=dict, init=False)  # by kind: none of it could work since then
    _watched: float = field(default_factory=time.monotonic, init=False)  # when we last looked at the children
    _stopping: bool = field(default=False, init=False)
    _kill_at: float = field(default=float("inf"), init=False)
    _announced: bool = field(default=False, init=False)
    _signalled: float = field(default=float("-inf"), init=False)
    _status: int = field(default=0, init=False)

    def run(self) -> int:
        """Serve until told to stop: 0 after SIGTERM or SIGINT, 1 when we gave up on a child or a second signal came."""
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="embert-"))
            (self._folder / "metrics").mkdir()
        except OSError as error:
            log.error("there is no room for our sockets and metrics, set TMPDIR: %s", error)  # noqa: TRY400
            return 1
        use_folder(self._folder / "metrics", "supervisor")
        from embert.server.observability.metrics import SupervisorMetrics

        self._metrics = SupervisorMetrics.create(range(len(self.devices)), __version__)
        self._engines = [_Child(f"engine-{i}", "embert.server.worker.process", i) for i in range(len(self.devices))]
        self._counters = SharedCounters.create(self.config.http_processes, len(self.devices))
        self._apis = [_Child(f"api-{i}", "embert.server.api.process", i) for i in range(self.config.http_processes)]
        self._states = [EngineState(i, "loading", "starting") for i in range(len(self.devices))]
        self._selector = selectors.DefaultSelector()
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._selector.register(wake_read, selectors.EVENT_READ)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the loop
        try:
            for child in (*self._engines, *self._apis):
                self._start(child)
            while self._children():
                for key, _ in self._selector.select(self._patience_s()):
                    if key.fd == wake_read:
                        with contextlib.suppress(BlockingIOError):
                            os.read(wake_read, 4096)
                    else:
                        self._listen_to(key.data)
                self._watch()
                self._reap()
                self._start_due()
                self._stop_in_order()
        finally:
            for child in (*self._engines, *self._apis):
                self._kill(child)
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._status

    # --- starting ---

    def _start(self, child: _Child) -> None:
        """Start a child, or try again later where the system has no descriptors, memory or processes left."""
        try:
            self._spawn(child)
        except OSError as error:
            log.error("%s cannot be started: %s; trying again in %.1f s", child.name, error, child.backoff_s)  # noqa: TRY400
            self._start_later(child)
            self._note_down(child)
            return
        assert child.process is not None  # noqa: S101 - just spawned
        assert child.control is not None  # noqa: S101
        child.starts += 1
        child.endpoint = f"{self._folder}/{child.name}.{child.starts}"
        child.ready, child.killed, child.ready_since, child.start_at = False, False, float("inf"), None
        child.started = child.reported = time.monotonic()
        child.doing = "importing modules"
        child.control.send(self._instructions(child))
        log.debug("%s started, pid %d", child.name, child.process.pid)

    def _spawn(self, child: _Child) -> None:
        """Make the process and our end of its line. Raises OSError, and leaves nothing open then."""
        mine, theirs = socket.socketpair()
        with theirs:
            inherited = [theirs.fileno(), self._counters.fd]
            if child in self._apis:
                inherited += [sock.fileno() for sock in self.sockets[child.index]]
                inherited += [self.metrics_socket.fileno()] if self.metrics_socket and child.index == 0 else []
            try:
                self._selector.register(mine, selectors.EVENT_READ, child)
                child.process = subprocess.Popen(
                    # -P: the working folder is not for code
                    [sys.executable, "-P", "-m", child.module, str(theirs.fileno())],
                    pass_fds=inherited,
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C is for the supervisor, which then ends the children in order
                )
            except OSError:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(mine)
                mine.close()
                raise
        child.control = ControlConnection(mine)

    def _start_later(self, child: _Child) -> None:
        child.start_at = time.monotonic() + child.backoff_s
        child.backoff_s = min(2 * child.backoff_s, BACKOFF_MAX_S)

    def _instructions(self, child: _Child) -> Message:
        if child in self._engines:
            return StartEngine(
                config=self.config,
                folder=str(self.model.folder),
                model_id=self.model.model_id,
                runtime_folder=str(self._folder),
                index=child.index,
                device=self.devices[child.index],
                endpoint=child.endpoint,
                counters_fd=self._counters.fd,
                engines=len(self._engines),
            )
        return StartApi(
            config=self.config,
            folder=str(self.model.folder),
            model_id=self.model.model_id,
            model_revision=self.model.revision,
            runtime_folder=str(self._folder),
            socket_fds=[sock.fileno() for sock in self.sockets[child.index]],
            metrics_fd=self.metrics_socket.fileno() if self.metrics_socket and child.index == 0 else None,
            worker=child.index,
            counters_fd=self._counters.fd,
            engines=self._states,
        )

    def _start_due(self) -> None:
        now = time.monotonic()
        for child in (*self._engines, *self._apis):
            if child.start_at is not None and child.start_at <= now and not self._stopping:
                self._start(child)

    def _patience_s(self) -> float:
        moments = [child.start_at for child in (*self._engines, *self._apis) if child.start_at is not None]
        moments.append(self._watched + WATCH_INTERVAL_S)
        if self._stopping:
            moments.append(self._kill_at)
        return max(0.0, min(moments) - time.monotonic())

    # --- listening ---

    def _listen_to(self, child: _Child) -> None:
        assert child.control is not None  # noqa: S101 - registered with its line
        for message in child.control.drain():
            if message is None:
                self._selector.unregister(child.control.socket)
                child.control.socket.close()
                return
            if isinstance(message, Progress):
                child.doing = message.doing
            elif isinstance(message, Ready):
                self._on_ready(child, message)
            elif isinstance(message, Failed):
                self._on_failed(message)

    def _on_ready(self, child: _Child, message: Ready) -> None:
        if child.killed:
            return  # too late
        child.ready, child.ready_since = True, time.monotonic()
        child.slowest_start_s = max(child.slowest_start_s, child.ready_since - child.started)
        self._note_alive(child)
        if child in self._engines:
            self._metrics.engine_up[child.index].set(1)
            if message.info is not None:
                longest = max(HANG_MIN_S, HANG_BATCHES * message.info.full_batch_s)
                child.patience_s = min(longest, self.config.engine_timeout)
            self._tell_state(EngineState(child.index, "ready", "", child.endpoint, message.info))
        if self._announced:
            log.info("%s is ready again, %.1f s after its start", child.name, time.monotonic() - child.started)
        elif all(each.ready for each in (*self._engines, *self._apis)):
            self._announced = True
            self._announce()

    def _on_failed(self, message: Failed) -> None:
        if self._stopping:
            return  # one sentence is enough: engines on several devices mostly fail for the same reason
        log.error("%s", message.message)
        if not self._announced:  # nobody has been served yet: a wrong model or option, which a new try does not mend
            self._give_up()

    def _give_up(self, farewell_s: float = 0.0) -> None:
        self._status = 1
        self._stop()
        self._kill_at = time.monotonic() + farewell_s

    def _announce(self) -> None:
        info = self._states[0].info
        assert info is not None  # noqa: S101 - engines are ready
        config = self.config
        devices = ", ".join(self.devices) if len(self.devices) > 1 else info.device
        log.info("encoder  %s on %s (%s), %s; %s", info.encoder, devices, info.device_name, info.dtype, info.choice)
        seconds = f" or {config.max_queue_seconds:g} s" if config.max_queue_seconds else ""
        log.info(
            "limits   batch %d tokens, queue %d tokens%s, request %d texts and %d bytes, %g s",
            info.max_batch_tokens,
            config.queue_budget(info.max_batch_tokens, len(self._engines)),
            seconds,
            config.max_client_batch_size,
            config.payload_limit,
            config.request_timeout,
        )
        url, took_s = self.url(), time.monotonic() - self.began
        log.info(
            "ready    %s after %.1f s, HTTP processes: %d; documentation at %s/docs", url, took_s, len(self._apis), url
        )
        if config.log_format == "text":
            key = " -H 'authorization: Bearer KEY'" if config.api_key or config.api_key_file else ""
            body = '{"input": "Hello, world"}'
            log.info("try      curl %s/v1/embeddings -H 'content-type: application/json'%s -d '%s'", url, key, body)

    def url(self) -> str:
        """Where a client on this machine finds us."""
        host, port = self.sockets[0][0].getsockname()[:2]
        scheme = "https" if self.config.ssl_certfile else "http"
        shown = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104
        return f"{scheme}://{shown}:{port}"

    def _tell_state(self, state: EngineState) -> None:
        self._states[state.index] = state
        for api in self._apis:
            if api.control is not None:
                api.control.send(state)

    # --- watching ---

    def _watch(self) -> None:
        """End children that show no life: they are lost like any other that dies, and started again."""
        now = time.monotonic()
        if now - self._watched < WATCH_INTERVAL_S:
            return
        asleep = now - self._watched > 4 * WATCH_INTERVAL_S  # the whole machine was, or we were stopped
        self._watched = now
        for child in (*self._engines, *self._apis):
            if child.process is None or child.killed:
                continue
            if asleep:
                self._note_alive(child)
            elif (hung := self._hung(child, now)) is not None:
                log.error("%s hangs: %s; ending it", child.name, hung)
                self._metrics.hangs.labels(self._kind(child)).inc()
                child.ready, child.killed = False, True
                child.process.kill()
                self._note_down(child)
            elif not child.ready and now - child.reported > self.config.start_timeout / PROGRESS_REPORTS:
                child.reported = now
                log.info("%s is still starting after %.0f s: %s", child.name, now - child.started, child.doing)
        if asleep:
            self._down_since = dict.fromkeys(self._down_since, now)
        self._watch_for_the_end(now)

    def _watch_for_the_end(self, now: float) -> None:
        """Leave when no engine, or no API process, has worked for too long: who started us may do better elsewhere."""
        for kind, children in (("engine", self._engines), ("api", self._apis)):
            if any(child.ready and now - child.ready_since > LIVED_WELL_S for child in children):
                self._down_since.pop(kind, None)
            since = self._down_since.get(kind)
            if since is None or self._stopping or any(child.ready for child in children):
                continue
            if self.config.give_up_after and now - since > self._longest_absence_s(children):
                what = "engine" if kind == "engine" else "HTTP process"
                log.error("no %s could work for %.0f s (--give-up-after): leaving", what, now - since)
                self._give_up(FAREWELL_S)

    def _longest_absence_s(self, children: list[_Child]) -> float:
        """--give-up-after, or more where a start takes so long that it could not succeed within that."""
        slowest_s = max(child.slowest_start_s for child in children)
        return max(self.config.give_up_after, 2 * slowest_s or self.config.start_timeout)

    def _note_down(self, child: _Child) -> None:
        """A child was lost: begin to count when no other of its kind can work."""
        children = self._engines if child in self._engines else self._apis
        if not any(each.ready for each in children):
            self._down_since.setdefault(self._kind(child), time.monotonic())

    def _kind(self, child: _Child) -> str:
        return "engine" if child in self._engines else "api"

    def _hung(self, child: _Child, now: float) -> str | None:
        """Why a child counts as hung, or None."""
        counters, i = self._counters, child.index
        if not child.ready:
            limit_s = self.config.start_timeout
            late = now - child.started > limit_s
            return f"not ready {limit_s:g} s after its start (--start-timeout), {child.doing}" if late else None
        if child in self._engines:
            since = counters.forward_since[i]
            if since and now - since > child.patience_s:
                return f"a forward runs for more than {child.patience_s:.1f} s"
            alive = counters.engine_alive[i]
        else:
            alive = counters.api_alive[i]
        silence_s = child.patience_s + SIGN_INTERVALS_S
        return f"no sign of life for more than {silence_s:.1f} s" if now - alive > silence_s else None

    def _note_alive(self, child: _Child) -> None:
        """Begin to count anew."""
        if not child.ready:
            child.started = child.reported = time.monotonic()
            return
        alive = self._counters.engine_alive if child in self._engines else self._counters.api_alive
        alive[child.index] = time.monotonic()
        if child in self._engines and self._counters.forward_since[child.index]:
            self._counters.forward_since[child.index] = time.monotonic()

    # --- losing and stopping ---

    def _children(self) -> list[_Child]:
        """Whom we stay for."""
        if not self._stopping:
            return [*self._engines, *self._apis]
        if time.monotonic() > self._kill_at + UNKILLABLE_S:
            return []
        return [child for child in (*self._engines, *self._apis) if child.process is not None]

    def _reap(self) -> None:
        for child in (*self._engines, *self._apis):
            if child.process is None or child.process.poll() is None:
                continue
            if child.control is not None and child.control.socket.fileno() >= 0:
                self._listen_to(child)  # its last words
            if child.control is not None and child.control.socket.fileno() >= 0:
                self._selector.unregister(child.control.socket)
                child.control.socket.close()
            status = child.process.returncode
            child.process, child.control, child.ready = None, None, False
            with contextlib.suppress(OSError):
                forget_process(child.name)
            self._lost(child, status)

    def _lost(self, child: _Child, status: int) -> None:
        how = f"was killed by {_signal_name(-status)}" if status < 0 else f"ended with status {status}"
        self._note_down(child)
        if child in self._engines:
            self._metrics.engine_up[child.index].set(0)
            self._counters.forward_since[child.index] = 0.0
            self._tell_state(EngineState(child.index, "down", f"the engine process {how} and is being restarted"))
        else:
            self._counters.admitted_tokens[child.index] = 0.0  # its clients are gone with it
        if self._stopping:
            return
        if not self._announced and not child.slowest_start_s and child.starts >= FIRST_STARTS:
            log.error("%s %s; that was its start number %d, and it never was ready", child.name, how, child.starts)
            self._give_up()
            return
        if time.monotonic() - child.ready_since > LIVED_WELL_S:
            child.backoff_s = BACKOFF_FIRST_S
        log.error("%s %s; starting it again in %.1f s", child.name, how, child.backoff_s)
        self._start_later(child)
        if child in self._engines:
            self._metrics.engine_restarts[child.index].inc()
        else:
            self._metrics.api_restarts.inc()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if time.monotonic() - self._signalled < SAME_SIGNAL_S:
            return
        if self._stopping:
            log.warning("%s again: leaving at once", signal.Signals(number).name)
            self._status = 1
            self._kill_at = time.monotonic()
            return
        self._signalled = time.monotonic()
        log.info(
            "%s: draining for up to %g s; again to leave at once",
            signal.Signals(number).name,
            self.config.drain_timeout,
        )
        self._stop()

    def _stop(self) -> None:
        self._stopping = True
        self._kill_at = time.monotonic() + self.config.drain_timeout + 5.0
        for api in self._apis:
            if api.control is not None:
                api.control.send(Drain())

    def _stop_in_order(self) -> None:
        """The API processes leave when their requests are answered; only then the engines, who answer them."""
        if not self._stopping:
            return
        if all(api.process is None for api in self._apis):
            for engine in self._engines:
                if engine.control is not None and engine.ready:
                    engine.control.send(Drain())
                    engine.ready = False
                elif engine.process is not None and self._states[engine.index].state != "ready":
                    self._kill(engine)  # still loading
        if time.monotonic() >= self._kill_at:
            for child in self._children():
                self._kill(child)

    def _kill(self, child: _Child) -> None:
        if child.process is not None:
            child.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(5)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # of most real-time signals
        return f"signal {number}"
