"""The supervisor's loop: starts, watches, restarts and stops the processes.

supervisor ── control ── HTTP process 0 … N-1     all share the listening sockets, which stay open while one restarts
           └─ control ── engine process 0 … G-1  one per device, with all models of that device; each start has its own
                                                 Unix socket
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import signal
import socket
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from embert.server.config import ServeConfig
from embert.server.ipc.control import (
    Drain,
    Drained,
    EngineState,
    Failed,
    LoadModel,
    Message,
    ModelFailed,
    ModelReady,
    Progress,
    Ready,
    Reload,
    StartEngine,
    StartHttp,
    describe_exit,
)
from embert.server.ipc.shared_counters import SharedCounters
from embert.server.ipc.signals import handle_signals
from embert.server.observability.metric_memory import MetricMemory
from embert.server.supervisor.announcement import announce
from embert.server.supervisor.child import FIRST_PAUSE_S, Child, Kind
from embert.server.supervisor.engine_models import EngineModels
from embert.server.supervisor.hangs import STABLE_S, HangDetector, Outages
from embert.server.supervisor.planned_model import PlannedModel

if TYPE_CHECKING:
    from embert.server.observability.metrics import SupervisorMetrics

log = logging.getLogger(__name__)

NO_MEMORY = "cannot allocate shared memory"  # precedes the reason
FIRST_STARTS = 3  # a process that dies this often before the server was ever ready will not come up
READING_LOSSES_MAX = 2  # HTTP processes lost while they read one model
PROGRESS_REPORTS = 10  # maximum log lines about one start, spread over --start-timeout
GIVE_UP_GRACE_S = 5.0  # for clients to get their 503
DRAIN_GRACE_S = 5.0  # after --drain-timeout, for the processes to end
UNKILLABLE_S = 10.0  # a process blocked in a driver or a file system survives SIGKILL; the supervisor exits without it
WATCH_INTERVAL_S = 0.5
SAME_SIGNAL_S = 0.5  # `timeout` and shells signal the process and then its group, which counts as one signal


@dataclass(eq=False)
class Supervisor:
    """Owns the children. `run` returns the exit status."""

    config: ServeConfig
    models: list[PlannedModel]
    broken: dict[str, str]  # models that cannot be read, by name, with the reason
    sockets: list[socket.socket]  # of all HTTP processes
    metrics_socket: socket.socket | None
    began: float
    memory: MetricMemory  # of metrics, with a region for this process
    metrics: SupervisorMetrics
    traces_url: str | None = None  # of the collector; None: no traces

    def __post_init__(self) -> None:
        self._instance = str(uuid.uuid4())  # a unique name of this server
        self._name = f"embert-{secrets.token_hex(8)}"  # of its sockets
        self._devices = list(dict.fromkeys(device for model in self.models for device in model.devices))
        self._engines = [Child("engine", i) for i in range(len(self._devices))]  # one for each device
        self._http_processes = [Child("http", i) for i in range(self.config.http_processes)]
        self._children = [*self._engines, *self._http_processes]
        self._engine_models = [
            EngineModels(model.start.number for model in self.models if device in model.devices)
            for device in self._devices
        ]
        self._states = [
            EngineState(i, "loading", "starting", models=dict(models.states))
            for i, models in enumerate(self._engine_models)
        ]
        self._outages = Outages(self.config.start_timeout)
        self._unreadable: dict[str, str] = {}  # by HTTP processes: name → reason
        self._reading_losses: Counter[int] = Counter()  # HTTP processes lost reading a model
        self._watched = time.monotonic()  # last run of `_watch`
        self._stopping = self._announced = False
        self._kill_at, self._signalled = float("inf"), float("-inf")
        # Calls that the loop makes for signals. Handlers must not send: they may have interrupted a message.
        self._signals: deque[Callable[[], None]] = deque()
        self._status = 0
        self._drained: dict[int, Drained] = {}  # by HTTP process

    def run(self) -> int:
        """Serve until a signal. Returns 0 after SIGTERM or SIGINT, 1 after giving up on a child or a second signal."""
        try:
            self.memory.add([child.name for child in self._children])
            self._counters = SharedCounters.create(len(self._http_processes), len(self._engines), len(self.models))
        except OSError as error:
            log.error("%s: %s", NO_MEMORY, error)  # noqa: TRY400
            return 1
        self.metrics.add_engines(range(len(self._engines)))
        self._hangs = HangDetector(self.config, self._counters)
        self._selector = selectors.DefaultSelector()
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._selector.register(wake_read, selectors.EVENT_READ)
        handle_signals(
            lambda number: self._signals.append(partial(self._end, number, time.monotonic())),
            lambda: self._signals.append(self._reload),
        )
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the loop
        try:
            for child in self._children:
                self._start(child)
            while self._awaited():
                for key, _ in self._selector.select(self._select_timeout_s()):
                    if key.fd == wake_read:
                        with contextlib.suppress(BlockingIOError):
                            os.read(wake_read, 4096)
                    else:
                        self._receive(key.data)
                while self._signals:
                    self._signals.popleft()()
                self._watch()
                self._reap()
                self._start_due()
                self._stop_in_order()
        finally:
            for child in self._children:
                child.kill()
        if self._announced:
            self._log_end()
        return self._status

    def _log_end(self) -> None:
        ends = self._drained.values()
        log.info(
            "stopped; requests since the signal: %d answered, %d refused, %d lost",
            sum(end.answered for end in ends),
            sum(end.refused for end in ends),
            sum(end.lost for end in ends),
        )

    def _siblings(self, kind: Kind) -> list[Child]:
        return self._engines if kind == "engine" else self._http_processes

    def _awaited(self) -> list[Child]:
        """Children for which the loop goes on."""
        if not self._stopping:
            return self._children
        if time.monotonic() > self._kill_at + UNKILLABLE_S:
            return []
        return [child for child in self._children if child.process is not None]

    def _select_timeout_s(self) -> float:
        moments = [child.start_at for child in self._children if child.start_at is not None]
        moments.append(self._watched + WATCH_INTERVAL_S)
        if self._stopping:
            moments.append(self._kill_at)
        return max(0.0, min(moments) - time.monotonic())

    # --- starting ---

    def _start(self, child: Child) -> None:
        """Start a child, or schedule another try if the system has no descriptors, memory or processes left."""
        inherited = [self._counters.fd, self.memory.fd]
        try:
            if child.kind == "http":
                inherited += [sock.fileno() for sock in self.sockets]
                inherited += [self.metrics_socket.fileno()] if self.metrics_socket and child.index == 0 else []
            child.spawn(inherited, self._selector)
        except OSError as error:
            delay_s = child.start_later()
            log.error("failed to start %s: %s; retrying in %.1f s", child.name, error, delay_s)  # noqa: TRY400
            self._outages.note_loss(child, self._siblings(child.kind))
            return
        assert child.process is not None  # noqa: S101 - just spawned
        child.endpoint = f"{self._name}/{child.name}.{child.starts}"
        child.send(self._instructions(child))
        log.debug("%s started, pid %d", child.name, child.process.pid)

    def _instructions(self, child: Child) -> Message:
        if child.kind == "engine":
            numbers, one_by_one = self._engine_models[child.index].begin()
            return StartEngine(
                config=self.config,
                models=[self.models[number].start for number in numbers],
                one_by_one=one_by_one,
                names=[model.start.name for model in self.models],
                memory_fd=self.memory.fd,
                index=child.index,
                device=self._devices[child.index],
                endpoint=child.endpoint,
                counters_fd=self._counters.fd,
                engines=len(self._engines),
                traces_url=self.traces_url,
                instance=self._instance,
            )
        return StartHttp(
            config=self.config,
            models=[model.start for model in self.models],
            broken=self.broken,
            memory_fd=self.memory.fd,
            socket_fds=[sock.fileno() for sock in self.sockets],
            metrics_fd=self.metrics_socket.fileno() if self.metrics_socket and child.index == 0 else None,
            http_index=child.index,
            counters_fd=self._counters.fd,
            engines=self._states,
            traces_url=self.traces_url,
            instance=self._instance,
        )

    def _start_due(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if child.start_at is not None and child.start_at <= now and not self._stopping:
                self._start(child)

    # --- messages of children ---

    def _receive(self, child: Child) -> None:
        assert child.control is not None  # noqa: S101 - registered together with it
        for message in child.control.drain():
            if message is None:
                child.disconnect(self._selector)
                return
            if isinstance(message, Progress):
                self._on_progress(child, message)
            elif isinstance(message, Ready):
                self._note_ready(child)
                self._announce()
            elif isinstance(message, ModelReady):
                self._on_model_ready(child, message)
            elif isinstance(message, ModelFailed):
                self._on_model_failed(child, message)
            elif isinstance(message, Failed):
                self._on_failed(message)
            elif isinstance(message, Drained):
                self._drained[child.index] = message

    def _on_progress(self, child: Child, message: Progress) -> None:
        child.doing = message.doing
        if message.model >= 0:
            if child.kind == "engine":
                self._engine_models[child.index].loads(message.model, message.doing)
                self._send_engine_state(child)
            else:
                child.reads = message.model
            if len(self.models) > 1:
                child.doing += f" of {self.models[message.model].start.name}"

    def _note_ready(self, child: Child) -> None:
        if child.killed or child.ready:
            return  # too late, or the engine's second model
        child.became_ready()
        self._hangs.restart_clock(child)
        if child.kind == "engine":
            self.metrics.engine_up[child.index].set(1)
        if self._announced:
            log.info("%s is ready again, %.1f s after its start", child.name, time.monotonic() - child.started)

    def _on_model_ready(self, child: Child, message: ModelReady) -> None:
        if child.killed:
            return
        models = self._engine_models[child.index]
        models.ready(message.model, message.info)
        self._note_ready(child)
        self._hangs.add_limit(child, message.info)
        self.metrics.hang_limit[child.index].set(child.hang_limit_s)
        self._send_engine_state(child)
        if len(self.models) > 1:
            name, info = self.models[message.model].start.name, message.info
            log.info("%s is ready on %s, %.1f s after it began to load", name, child.name, info.load_s)
        self._announce()

    def _on_model_failed(self, child: Child, message: ModelFailed) -> None:
        if child.kind == "http":  # which has logged it, and serves the others
            self._unreadable[self.models[message.model].start.name] = message.message
            return
        if self._stopping:
            return  # one sentence is enough: engines on several devices mostly fail for the same reason
        several = len(self.models) > 1
        log.error("%s%s", f"{self.models[message.model].start.name}: " if several else "", message.message)
        self._engine_models[child.index].failed(message.model, message.message)
        self._send_engine_state(child)
        # The server was never ready: a retry does not fix wrong models or options.
        is_fatal = not several or all(models.all_failed for models in self._engine_models)
        if not self._announced and is_fatal:
            self._give_up()
        self._announce()

    def _on_failed(self, message: Failed) -> None:
        if self._stopping:
            return
        log.error("%s", message.message)
        if not self._announced:
            self._give_up()

    def _announce(self) -> None:
        """Log the models and addresses once every model is ready or has failed."""
        engines = zip(self._engines, self._engine_models, strict=True)
        if self._announced or self._stopping or not all(process.ready for process in self._http_processes):
            return
        if all((engine.ready and models.settled) or models.all_failed for engine, models in engines):
            self._announced = True
            self.metrics.starting.set(0)
            took_s = time.monotonic() - self.began
            broken = {**self.broken, **self._unreadable}
            if not announce(self.config, self.models, broken, self._states, self.sockets[0], took_s):
                self._give_up()

    def _send_engine_state(self, child: Child) -> None:
        """Send the state of an engine and its models to the HTTP processes."""
        state: Literal["ready", "loading"] = "ready" if child.ready else "loading"
        models = dict(self._engine_models[child.index].states)
        self._send_state(EngineState(child.index, state, "", child.endpoint if child.ready else "", models))

    def _send_state(self, state: EngineState) -> None:
        self._states[state.index] = state
        ready = {
            number
            for engine in self._states
            if engine.state == "ready"
            for number, model in engine.models.items()
            if model.state == "ready"
        }
        for planned in self.models:
            self.metrics.model_ready[planned.start.name].set(planned.start.number in ready)
        for process in self._http_processes:
            process.send(state)

    # --- watching ---

    def _watch(self) -> None:
        """Kill hung children, log slow starts, and give up after too long an outage."""
        now = time.monotonic()
        if now - self._watched < WATCH_INTERVAL_S:
            return
        was_stopped = now - self._watched > 4 * WATCH_INTERVAL_S  # this process, or the whole machine
        self._watched = now
        if now - self.began > self.config.start_timeout:
            self.metrics.starting.set(0)
        for child in self._children:
            if child.process is None:
                continue
            if child.killed:
                child.process.kill()  # its stacks are in the log by now; its end is handled like any other
            elif was_stopped:
                self._hangs.restart_clock(child)
            elif (hung := self._hangs.reason(child, now)) is not None:
                log.error("%s hung: %s; killing it", child.name, hung)
                self.metrics.hangs[child.kind].inc()
                child.dump_stacks()
                self._outages.note_loss(child, self._siblings(child.kind))
            elif not child.ready and now - child.reported > self.config.start_timeout / PROGRESS_REPORTS:
                child.reported = now
                log.info("%s is still starting after %.0f s: %s", child.name, now - child.started, child.doing)
        if was_stopped:
            self._outages.restart_clocks(now)
        for engine in self._engines:
            if engine.ready and not self._stopping:
                self._watch_models(engine, now)
        self._watch_outages(now)

    def _watch_models(self, engine: Child, now: float) -> None:
        """Give up on models that load for too long, and load those whose quarantine has ended."""
        models, limit_s = self._engine_models[engine.index], self.config.start_timeout
        if not models.settled and now - engine.started > limit_s:
            for number in models.late(f"not ready {limit_s:g} s after the start of {engine.name} (--start-timeout)"):
                log.error("%s: %s", self.models[number].start.name, models.states[number].detail)
            self._send_engine_state(engine)
            self._announce()
        if due := models.due(now):
            for number in due:
                engine.send(LoadModel(self.models[number].start))
            self._send_engine_state(engine)

    def _watch_outages(self, now: float) -> None:
        """Exit after too long without any engine or any HTTP process; a service manager may restart the server."""
        kinds: tuple[tuple[Kind, str], ...] = (("engine", "engine"), ("http", "HTTP process"))
        for kind, what in kinds:
            outage_s = self._outages.exceeded_s(kind, self._siblings(kind), now)
            if outage_s is not None and not self._stopping:
                log.error("no %s has been available for %.0f s; exiting", what, outage_s)
                self._give_up(GIVE_UP_GRACE_S)

    # --- losing children ---

    def _reap(self) -> None:
        for child in self._children:
            status = child.exit_status()
            if status is None:
                continue
            if child.connected:
                self._receive(child)  # its last messages
            child.disconnect(self._selector)
            child.mark_dead()
            self.memory.region(child.name).forget()
            self._on_exit(child, status)

    def _on_exit(self, child: Child, status: int) -> None:
        exit_detail = describe_exit(status)
        self._outages.note_loss(child, self._siblings(child.kind))
        if child.kind == "engine":
            self.metrics.engine_up[child.index].set(0)
            runs = self._counters.forward_since[child.index] > 0
            running = int(self._counters.forward_model[child.index]) if runs else None
            self._counters.forward_since[child.index] = 0.0
            models = self._engine_models[child.index]
            all_failed = models.all_failed
            if (quarantined := models.lost(exit_detail, time.monotonic(), running)) is not None:
                log.error("%s is quarantined: %s", self.models[quarantined[0]].start.name, quarantined[1])
            detail = f"the engine process {exit_detail} and is being restarted"
            self._send_state(EngineState(child.index, "down", detail, models=dict(models.states)))
        else:
            all_failed = False
            if self._stopping:  # without its last message, what was in flight is lost
                lost = Drained(0, 0, int(self._counters.in_flight[child.index]))
                self._drained.setdefault(child.index, lost)
            self._counters.forget_http(child.index)  # its clients' connections have closed with it
            self._note_reading_loss(child, exit_detail)
        if self._stopping:
            return
        is_decisive = len(self._engines) == 1 or not all_failed
        if not self._announced and not child.slowest_start_s and child.starts >= FIRST_STARTS and is_decisive:
            log.error("%s %s; failed to start %d times; giving up", child.name, exit_detail, child.starts)
            self._give_up()
            return
        if time.monotonic() - child.ready_since > STABLE_S:
            child.pause_s = FIRST_PAUSE_S
        delay_s = child.start_later()
        log.error("%s %s; restarting in %.1f s", child.name, exit_detail, delay_s)
        if child.kind == "engine":
            self.metrics.engine_restarts[child.index].inc()
        else:
            self.metrics.count_http_restart()

    def _note_reading_loss(self, process: Child, exit_detail: str) -> None:
        """Quarantine a model whose tokenizer ends HTTP processes, if there are other models to serve."""
        number, process.reads = process.reads, -1
        if process.ready_since < float("inf") or number < 0 or len(self.models) == 1:
            return
        self._reading_losses[number] += 1
        if self._reading_losses[number] == READING_LOSSES_MAX:
            name = self.models[number].start.name
            self.broken[name] = f"an HTTP process {exit_detail} while it read this model, {READING_LOSSES_MAX} times"
            log.error("%s is quarantined: %s", name, self.broken[name])

    # --- stopping ---

    def _end(self, number: int, arrived: float) -> None:
        if arrived - self._signalled < SAME_SIGNAL_S:
            return
        if self._stopping:
            log.warning("received %s again; exiting immediately", signal.Signals(number).name)
            self._status = 1
            self._kill_at = time.monotonic()
            return
        self._signalled = arrived
        log.info(
            "received %s; draining for up to %g s, a second signal exits immediately",
            signal.Signals(number).name,
            self.config.drain_timeout,
        )
        self._stop()

    def _reload(self) -> None:
        log.info("received SIGHUP; keys and certificates are read again")
        for process in self._http_processes:
            process.send(Reload())

    def _give_up(self, grace_s: float = 0.0) -> None:
        self._status = 1
        self._stop()
        self._kill_at = time.monotonic() + grace_s

    def _stop(self) -> None:
        self._stopping = True
        self.metrics.draining.set(1)
        self._kill_at = time.monotonic() + self.config.drain_timeout + DRAIN_GRACE_S
        for process in self._http_processes:
            process.send(Drain())

    def _stop_in_order(self) -> None:
        """Drain the engines only after the HTTP processes, which need their results, have exited."""
        if not self._stopping:
            return
        if all(process.process is None for process in self._http_processes):
            for engine in self._engines:
                if engine.ready and not engine.draining:
                    engine.send(Drain())
                    engine.draining = True
                elif engine.process is not None and self._states[engine.index].state != "ready":
                    engine.kill()  # still loading
        if time.monotonic() >= self._kill_at:
            for child in self._awaited():
                child.kill()
