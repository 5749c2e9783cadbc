"""The device loop: takes batches from the queue, runs them on the encoder and answers them.

An engine process has two threads that matter, because a forward must never wait for a request, nor a request for a
forward:

    receiving thread   socket → queue                                       (socket_server.py, work_queue.py)
    device loop        queue → pack → encoder → answers → socket            (this file; only it touches the encoder)

A third thread follows the supervisor's control connection.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from embert.engine import Encoder, Model, PackedBatch, Rows, Task
from embert.engine.errors import EncoderError, EncoderLost
from embert.engine.packing import cumulative
from embert.engine.tasks import ALL_TASKS
from embert.server.ipc.control import ControlConnection, Drain, StartEngine
from embert.server.ipc.framing import Channel
from embert.server.ipc.messages import Part
from embert.server.ipc.shared_counters import MAX_BATCHES_IN_FLIGHT, SharedCounters
from embert.server.observability.logs import exit_now
from embert.server.observability.metrics import EngineMetrics
from embert.server.observability.tracing.batch_tracer import BatchTracer
from embert.server.observability.tracing.sender import RecordSender
from embert.server.worker.batching import batch_of, pack, runs_alone, sampled
from embert.server.worker.health import Health
from embert.server.worker.responder import Responder
from embert.server.worker.scheduler import Batch, Scheduler
from embert.server.worker.socket_server import SocketServer
from embert.server.worker.throughput import ThroughputEstimate
from embert.server.worker.work_queue import WorkQueue

__all__ = ["EngineLoop"]

log = logging.getLogger(__name__)

PROBE_INTERVAL_S = 5.0  # an idle engine runs a forward this often, so that a broken one is noticed
# The next batch is submitted this long before the expected end of the running one: the time that submitting takes plus
# the error of the expectation.
LEAD_MIN_S = 0.0005
LEAD_SHARE = 0.15  # of the time left
LEAD_TIME_LEFT_MAX_S = 0.1  # beside a longer batch the gap does not matter, and an error would cost more


@dataclass(slots=True)
class _InFlight:
    """A batch on the encoder."""

    batch: Batch
    ticket: Any  # an EncoderError when submitting failed
    started: float
    queued: bool  # it left others waiting
    slot: int  # in the shared counters
    ended: float = 0.0
    lead_s: float = 0.0  # from the submission of what waited to the expected end; 0: none was submitted that way
    rows: dict[Task, Rows] | EncoderError | None = None  # set by `_wait`; None: the encoder was lost


class EngineLoop:
    """Owns the encoder and everything around it. `run` is the main thread's."""

    def __init__(
        self, start: StartEngine, model: Model, encoder: Encoder, exit_process: Callable[[int], Any] = exit_now
    ) -> None:
        config = start.config
        self._index = start.index
        self._endpoint = start.endpoint
        self._encoder = encoder
        # A CPU encoder runs only while it is waited for: a batch submitted ahead would be formed, but not run, earlier.
        self._submits_ahead = encoder.device != "cpu"
        self._exit = exit_process
        self._has = model.tasks
        self._longest = model.max_input_length
        self._probe = _batch_of([1], _main_task(model.tasks))
        self._counters = SharedCounters(start.counters_fd, config.http_processes, start.engines)
        self._free_slots = list(range(MAX_BATCHES_IN_FLIGHT))  # of the shared counters
        for slot in self._free_slots:
            self._counters.set_running(self._index, slot, ())
        facts = {"model": model.model_id, "dtype": encoder.dtype, "backend": encoder.name, "device": encoder.device}
        self._metrics = EngineMetrics(start.index, config.latency_buckets, facts)
        self._throughput = ThroughputEstimate()
        scheduler = Scheduler(encoder.batch_tokens, config.max_batch_requests, encoder.max_batch_tokens)
        self._queue = WorkQueue(scheduler, self._throughput, self._metrics, self._refuse)
        self._health = Health(start.index, self._counters, self._throughput, self._metrics, self._queue.tokens)
        self._server = SocketServer(self._health.status, self._queue.submit, self._queue.disconnect)
        self._responder = Responder(self._server.send, self._queue.drop, config.max_answer_weights)
        self._tracer = None  # of batches with sampled requests
        if start.traces_fd is not None:
            self._tracer = BatchTracer(RecordSender(start.traces_fd, f"engine-{start.index}"), start.index)

    # --- starting ---

    def warm_up(self) -> float:
        """Run the smallest batch and the largest, so that no client pays for one-time work.

        Returns the duration of the largest in seconds: the only known speed of the engine until there is a queue.
        """
        budget = self._encoder.batch_tokens
        lengths = [min(64, budget)] * max(1, budget // 64)
        full = _batch_of(lengths, _main_task(self._has))
        for batch in (full, self._probe, self._probe.wanting(self._has)):
            self._run(batch)
        probe_s, full_s = self._shortest_s(self._probe), self._shortest_s(full)
        self._throughput.calibrate(probe_s, max(0.0, full_s - probe_s) / full.tokens)
        ended = time.monotonic()
        self._throughput.add_batch(ended - full_s, ended, full.tokens, queued=True)
        self._health.succeeded()
        return full_s

    def longest_text_s(self, full_batch_s: float) -> float:
        """About how long the longest text takes, from the duration of `warm_up`'s largest batch.

        By count, attention takes length / (6 · hidden size) of the time of all else in a layer.
        """
        longest = self._longest
        return full_batch_s * longest / self._encoder.batch_tokens * (1 + longest / (6 * self._encoder.hidden_size))

    def _shortest_s(self, batch: PackedBatch) -> float:
        """The duration of a batch; the shortest of three where batches are submitted by their expected end."""
        lasted_s = []
        for _ in range(3 if self._submits_ahead else 1):
            started = time.monotonic()
            self._run(batch)
            lasted_s.append(time.monotonic() - started)
        return min(lasted_s)

    def _run(self, batch: PackedBatch) -> None:
        self._encoder.wait(self._encoder.submit(batch))

    def listen(self) -> None:
        """Accept requests from now on, in the receiving thread."""
        self._server.listen(self._endpoint)

    # --- running ---

    def run(self) -> None:
        """Run batches until drained. A free encoder takes whatever waits.

        A GPU gets the next batch while it is busy: a full one at once, any other shortly before the running batch is
        expected to end, and at the latest before the rows of the running batch are answered.
        """
        running: _InFlight | None = None
        while True:
            if running is None:
                batch = self._queue.wait_for_batch(self._idle_s, self._on_idle)
                if batch is None:
                    return
                running = self._submit(batch)
                continue
            following = self._submit_ahead(running, full=True) or self._submit_before_end(running)
            self._wait(running)
            if following is None and running.rows is not None:
                following = self._submit_ahead(running, full=False)
            self._settle(running)
            self._queue.done(running.batch)
            running = following

    def _submit_ahead(self, running: _InFlight, *, full: bool) -> _InFlight | None:
        """Submit the next batch before the running one is answered; with `full` only if it cannot gain from waiting."""
        if not self._submits_ahead or runs_alone(running.batch):
            return None
        batch = self._queue.take_ahead(full=full)
        return self._submit(batch) if batch is not None else None

    def _submit_before_end(self, running: _InFlight) -> _InFlight | None:
        """Submit what waits shortly before the running batch is expected to end, so that the encoder is never idle.

        Requests that arrive afterwards miss that batch, so it is not done earlier than needed. It is not done at all
        for batches so short that most of the time to gather requests would be lost.
        """
        if not self._submits_ahead or runs_alone(running.batch):
            return None
        end = self._throughput.expected_end(running.started, running.batch.tokens)
        left_s = end - time.monotonic()
        if not 2 * LEAD_MIN_S < left_s < LEAD_TIME_LEFT_MAX_S:
            return None
        running.lead_s = max(LEAD_MIN_S, LEAD_SHARE * left_s)
        time.sleep(left_s - running.lead_s)
        return self._submit_ahead(running, full=False)

    def _submit(self, batch: Batch) -> _InFlight:
        started = time.monotonic()
        queued = self._queue.texts() > 0
        slot = self._free_slots.pop()
        self._counters.set_running(self._index, slot, [piece.request.payload.id for piece in batch.slices])
        try:
            ticket: Any = self._health.watched(lambda: self._encoder.submit(pack(batch.slices)))
        except EncoderError as error:
            ticket = error
        return _InFlight(batch, ticket, started, queued, slot)

    def _wait(self, flight: _InFlight) -> None:
        ticket, asked = flight.ticket, time.monotonic()
        try:
            if isinstance(ticket, EncoderError):
                raise ticket
            flight.rows = self._health.watched(lambda: self._encoder.wait(ticket))
        except EncoderLost as error:
            # A batch of several requests is not answered: the API processes send each again, to run alone. So only the
            # request at fault ever fails.
            if len(flight.batch.slices) == 1:
                self._responder.fail(flight.batch.slices, error)
            flight.ended = time.monotonic()
            self._trace(flight, error)
            self._give_up(error)
            return
        except EncoderError as error:
            flight.rows = error
        self._counters.set_running(self._index, flight.slot, ())
        self._free_slots.append(flight.slot)
        flight.ended = time.monotonic()
        if flight.lead_s:
            self._throughput.note_prediction(too_long=flight.ended - asked < flight.lead_s / 5)

    def _settle(self, flight: _InFlight) -> None:
        """Answer a batch that has been waited for."""
        batch, rows, started, ended = flight.batch, flight.rows, flight.started, flight.ended
        if rows is None:
            return
        if isinstance(rows, EncoderError):
            self._trace(flight, rows)
            self._bisect(batch, rows)
        else:
            self._health.succeeded()
            self._throughput.add_batch(started, ended, batch.tokens, queued=flight.queued)
            self._responder.answer(batch.slices, rows, started, ended)
            self._observe(batch, started, ended)
            self._trace(flight)

    def _trace(self, flight: _InFlight, error: Exception | None = None) -> None:
        """Record a forward with texts of sampled requests; one that failed is sent at once."""
        if self._tracer is None:
            return
        batch = flight.batch
        self._tracer.record(
            sampled(batch.slices),
            started=flight.started,
            ended=flight.ended,
            texts=batch.texts,
            tokens=batch.tokens,
            requests=len(batch.slices),
            reason="" if error is None else str(error),
        )
        if error is not None:
            self._tracer.flush()

    def _bisect(self, batch: Batch, error: EncoderError) -> None:
        """Halve a batch that failed until only the requests that fail by themselves get the error."""
        if len(batch.slices) == 1:
            self._responder.fail(batch.slices, error)
            return
        log.warning("a batch of %d texts failed, running it again in halves: %s", batch.texts, error)
        middle = len(batch.slices) // 2
        for half in (batch.slices[:middle], batch.slices[middle:]):
            flight = self._submit(batch_of(batch.task, half))
            self._wait(flight)
            self._settle(flight)

    def _observe(self, batch: Batch, started: float, ended: float) -> None:
        metrics = self._metrics
        metrics.batches.inc()
        metrics.batch_texts.observe(batch.texts)
        metrics.batch_tokens.observe(batch.tokens)
        metrics.fill_ratio.observe(min(1.0, batch.tokens / self._encoder.batch_tokens))
        metrics.inference_duration.observe(ended - started)
        for piece in batch.slices:
            metrics.queue_duration.observe(max(0.0, started - piece.request.payload.admitted))
        cancelled = self._queue.disconnected_texts(batch)
        if cancelled:
            metrics.cancelled_texts["batched"].inc(cancelled)

    def _idle_s(self) -> float:
        """Seconds without a batch until there is something else to do."""
        return PROBE_INTERVAL_S if self._tracer is None else min(PROBE_INTERVAL_S, self._tracer.flush_due_s)

    def _on_idle(self) -> None:
        if self._tracer is not None:
            self._tracer.flush()
        if time.monotonic() - self._health.last_success < PROBE_INTERVAL_S:
            return
        try:
            self._health.watched(lambda: self._run(self._probe))
            self._health.succeeded()
        except EncoderLost as error:
            self._give_up(error)
        except EncoderError:
            log.exception("the idle probe failed")

    def _refuse(self, channel: Channel, parts: list[Part]) -> None:
        self._server.send(channel, parts)

    # --- ending ---

    def _give_up(self, error: Exception) -> None:
        """End the process, because the encoder is lost; the supervisor starts another one."""
        log.critical("the encoder is lost, this process ends: %s", error)
        self._server.close()
        self._exit(70)

    def follow(self, control: ControlConnection, runtime_folder: str) -> None:
        """Obey the supervisor, and exit when it does. Runs in a thread of its own."""
        while True:
            message = control.receive()
            if message is None:
                shutil.rmtree(runtime_folder, ignore_errors=True)
                self._exit(1)
                return
            if isinstance(message, Drain):
                self._queue.drain()

    def close(self) -> None:
        """Send the remaining answers, then free the encoder."""
        self._server.close()
        if self._tracer is not None:
            self._tracer.flush()
        self._encoder.close()


def _batch_of(lengths: list[int], tasks: Task) -> PackedBatch:
    """A batch of texts of so many tokens each, all of id 0."""
    return PackedBatch(np.zeros(sum(lengths), np.int32), cumulative(np.array(lengths, np.int32))).wanting(tasks)


def _main_task(tasks: Task) -> Task:
    """The task by which an engine is timed and probed: the first that it has."""
    return next(task for task in ALL_TASKS if task in tasks)
