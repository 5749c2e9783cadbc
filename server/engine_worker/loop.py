"""The device loop: takes batches from the queue, runs them on the encoder and sends the results.

An engine process has two main threads, so that a forward never waits for a request, nor a request for a long forward:

    device loop        socket → queue → pack → encoder → results → socket   (this file; only it touches loaded encoders)
    receiving thread   socket → queue, while the device loop waits long     (socket_server.py, work_queue.py)

A third thread follows the supervisor's control connection. Models load in further threads (process.py), and are
added here when they are ready.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from embert.engine.errors import EncoderError, EncoderLost
from embert.server.config.options import MAX_RESPONSE_WEIGHTS
from embert.server.engine_worker.batches import InFlightBatch, InFlightQueue, Responder, batch_of, pack
from embert.server.engine_worker.loaded_model import LoadedModel
from embert.server.engine_worker.scheduler import Batch
from embert.server.engine_worker.socket_server import SocketServer
from embert.server.engine_worker.throughput import BusyTime
from embert.server.engine_worker.work_queue import WorkQueue
from embert.server.ipc.channel import EngineStatus
from embert.server.ipc.control import ControlConnection, Drain, LoadModel, StartEngine, StartModel
from embert.server.ipc.shared_counters import MAX_BATCHES_IN_FLIGHT, SharedCounters
from embert.server.observability.logs import exit_now
from embert.server.observability.metrics import EngineMetrics

if TYPE_CHECKING:
    from embert.server.engine_worker.batch_tracer import BatchTracer
    from embert.server.observability.tracing.span_export import SpanExport


log = logging.getLogger(__name__)

SHORT_WAIT_S = 0.001  # for the encoder, during which the sockets may stay unread
RESPONSES_MAX_S = 0.01  # longest time of responses that counts: a pause of the machine counts little
IDLE_WRITE_S = 0.001  # without work, after which metrics are written: then nothing waits for that
BUSY_INTERVAL_S = 1.0  # between updates of the gauge
PROBE_INTERVAL_S = 5.0  # an idle engine runs a forward this often, so that a broken one is noticed

ResultT = TypeVar("ResultT")


class EngineLoop:
    """Owns the encoders, the queue and the sockets. `run` is the main thread's."""

    def __init__(self, start: StartEngine, exit_process: Callable[[int], Any] = exit_now) -> None:
        config = start.config
        self._index = start.index
        self._endpoint = start.endpoint
        self._exit = exit_process
        self._models: dict[int, LoadedModel] = {}  # by number
        self._known = len(start.names)
        self._counters = SharedCounters(start.counters_fd, config.http_processes, start.engines, len(start.names))
        self._free_slots = list(range(MAX_BATCHES_IN_FLIGHT))  # of the shared counters
        for slot in self._free_slots:
            self._counters.set_running(self._index, slot, ())
        self._metrics = EngineMetrics(start.index)
        self._busy = BusyTime()
        self._queue = WorkQueue(
            self._metrics,
            lambda channel, parts: self._server.send(channel, parts),
            lambda: self._server.wake(),
        )
        self._health = Health(start.index, self._counters, self._busy, self._metrics, self._queue.tokens, self._rates)
        self._server = SocketServer(
            self._health.status, self._queue.submit, self._queue.disconnect, self._queue.publish
        )
        self._responder = Responder(self._server.send, self._queue.drop)
        self._work = InFlightQueue()
        self._probed = 0  # idle probes so far
        self._written_at, self._is_written = 0.0, False  # of metrics
        self._tracer: BatchTracer | None = None
        self._spans: SpanExport | None = None
        if start.traces_url is not None:
            from opentelemetry.sdk.trace.sampling import ALWAYS_ON

            from embert.server.engine_worker.batch_tracer import BatchTracer
            from embert.server.observability.tracing.span_export import start_span_export

            self._spans = start_span_export(start.traces_url, start.instance, ALWAYS_ON)
            if self._spans is not None:
                self._tracer = BatchTracer(self._spans.tracer, start.index)

    # --- starting ---

    def listen(self) -> None:
        """Accept requests from now on, in the receiving thread."""
        self._server.listen(self._endpoint)

    def add(self, model: LoadedModel) -> None:
        """Run requests of a model from now on. Any thread may call it."""
        encoder = model.encoder
        self._metrics.of(model.name)  # its series are there before the first batch
        self._metrics.describe(
            {
                "model": model.name,
                "model_id": model.model.model_id,
                "dtype": encoder.dtype,
                "backend": encoder.name,
                "device": encoder.device,
            }
        )
        self._models = {**self._models, model.number: model}
        self._queue.add_model(model)
        self._health.succeeded()
        self._metrics.write_last_success()  # its warm-up was one

    def _rates(self) -> list[float]:
        models = self._models
        return [models[number].throughput.tokens_per_s if number in models else 0.0 for number in range(self._known)]

    # --- running ---

    def run(self) -> None:
        """Run batches until drained. A free encoder takes the requests that wait.

        A GPU gets the next batch while it is busy: a full one at once, any other shortly before the device is expected
        to need it, and at the latest before responses are sent. While short texts arrive, a full batch waits as long;
        while interactive requests arrive, a full one of low-priority requests does. Responses wait while the device is
        about to be idle (batches.py).
        """
        work = self._work
        while True:
            if not work.in_flight and not work.unsent:
                batch = self._queue.wait_for_batch(self._server.serve, self._idle_s, self._on_idle)
                if batch is None:
                    return
                work.in_flight.append(self._submit(batch))
            if not (work.unsent and self._server.is_handed_over()):  # taking over takes as long as sending responses
                self._server.serve(0.0)
            if work.may_grow and self._submit_ahead():
                continue
            unsent = work.next_unsent()
            if unsent is None:
                if not work.in_flight[0].expected_s or work.left_s(time.monotonic()) > SHORT_WAIT_S:
                    self._server.hand_over()
                self._submit_before_end()
            elif not work.waits_before(unsent, time.monotonic(), full=self._queue.full):
                self._send_results(unsent)
                continue
            oldest = work.in_flight.popleft()
            self._wait(oldest)
            work.unsent.append(oldest)
            while not isinstance(oldest.rows, dict) and (unsent := work.next_unsent()):
                self._send_results(unsent)  # the halves of a failed batch need the free slot

    def _submit_ahead(self) -> bool:
        """Submit the next batch if the device needs it now, or a full one if no short text is expected."""
        work, now = self._work, time.monotonic()
        if not work.in_flight:
            return self._follow(full=False)
        needed = work.needs_batch(now)
        if not needed and (len(work.in_flight) > 1 or self._queue.expects_short()):
            return False
        return self._follow(full=True, low_priority=needed or not self._queue.expects_interactive())

    def _submit_before_end(self) -> None:
        """Submit the next batch shortly before the only one is expected to end, so that the encoder is never idle.

        Requests that arrive afterwards miss that batch, so it is submitted as late as possible. It is not submitted
        ahead of the end of a batch so short that most of the time to gather requests would be lost.
        """
        work = self._work
        lead_s = work.lead_s(time.monotonic(), full=self._queue.full)
        if not lead_s:
            return
        work.in_flight[0].lead_s = lead_s
        time.sleep(max(0.0, work.left_s(time.monotonic()) - lead_s))
        self._follow(full=False)

    def _follow(self, *, full: bool, low_priority: bool = True) -> bool:
        """Submit the next batch behind the running one; with `full` only if it cannot gain from waiting."""
        work = self._work
        if not self._free_slots:
            return False
        batch = self._queue.take_ahead(full=full, low_priority=low_priority, exclude=work.full_models())
        if batch is None:
            return False
        work.in_flight.append(self._submit(batch))
        return True

    def _send_results(self, flight: InFlightBatch) -> None:
        """Send the results of a batch that has ended, and forget it."""
        self._work.unsent.remove(flight)
        began = time.monotonic()
        self._settle(flight)
        self._queue.done(flight.batch)
        ended = time.monotonic()
        flight.model.responses_s += 0.2 * (min(ended - began, RESPONSES_MAX_S) - flight.model.responses_s)
        self._is_written = False
        if ended - self._written_at >= EngineMetrics.WRITE_INTERVAL_S:
            self._write_metrics(ended)

    def _write_metrics(self, now: float) -> None:
        self._written_at, self._is_written = now, True
        self._metrics.write()
        self._queue.publish()

    def _submit(self, batch: Batch) -> InFlightBatch:
        started = time.monotonic()
        model = self._models[batch.model]  # type: ignore[index]  # its number
        slot = self._free_slots.pop()
        self._counters.set_running(self._index, slot, [piece.request.message.id for piece in batch.slices])
        try:
            ticket: Any = self._health.watch(model.number, lambda: model.encoder.submit(pack(batch.slices)))
        except EncoderError as error:
            ticket = error
        flight = InFlightBatch(batch, model, ticket, started, slot)
        self._work.expect(flight)
        return flight

    def _wait(self, flight: InFlightBatch) -> None:
        ticket, wait_began = flight.ticket, time.monotonic()
        try:
            if isinstance(ticket, EncoderError):
                raise ticket
            flight.rows = self._health.watch(flight.model.number, lambda: flight.model.encoder.wait(ticket))
        except EncoderLost as error:
            # A batch of several requests gets no results: the HTTP processes resend each, isolated. So only the request
            # at fault ever fails.
            if len(flight.batch.slices) == 1:
                self._responder.fail(flight.batch.slices, error)
            flight.ended = time.monotonic()
            if self._tracer is not None:
                self._tracer.record(flight, error)
            self.give_up(error)
            return
        except EncoderError as error:
            flight.rows = error
        self._counters.set_running(self._index, flight.slot, ())
        self._free_slots.append(flight.slot)
        flight.ended = time.monotonic()
        self._work.note_end(flight)
        flight.seconds = self._busy.add(flight.started, flight.ended)
        self._metrics.models[flight.model.name].busy_s += flight.seconds
        if flight.lead_s:
            flight.model.throughput.note_prediction(too_long=flight.ended - wait_began < flight.lead_s / 5)

    def _settle(self, flight: InFlightBatch) -> None:
        """Count a batch that has ended, and send its rows or retry its halves."""
        batch, rows, model = flight.batch, flight.rows, flight.model
        if rows is None:
            return
        if isinstance(rows, EncoderError):
            self._queue.settle(batch, flight.seconds)
            if self._tracer is not None:
                self._tracer.record(flight, rows)
            self._bisect(batch, rows)
        else:
            self._health.succeeded()
            self._responder.send_rows(batch.slices, rows, flight.began, flight.ended, MAX_RESPONSE_WEIGHTS)
            self._queue.settle(batch, flight.seconds)
            model.throughput.add_batch(flight.seconds, batch.counted)
            self._observe(flight)
            if self._tracer is not None:
                self._tracer.record(flight)

    def _bisect(self, batch: Batch, error: EncoderError) -> None:
        """Bisect a failed batch, so that only the requests at fault get the error."""
        if len(batch.slices) == 1:
            self._responder.fail(batch.slices, error)
            return
        log.warning("a batch of %d texts failed; retrying it in halves: %s", batch.texts, error)
        middle = len(batch.slices) // 2
        for half in (batch.slices[:middle], batch.slices[middle:]):
            flight = self._submit(batch_of(batch.model, half))
            self._wait(flight)
            self._settle(flight)

    def _observe(self, flight: InFlightBatch) -> None:
        metrics, batch = self._metrics.models[flight.model.name], flight.batch
        metrics.batches += 1
        metrics.batch_texts.observe(batch.texts)
        metrics.batch_tokens.observe(batch.tokens)
        metrics.fill_ratio.observe(min(1.0, batch.counted / flight.model.encoder.batch_tokens))
        metrics.batch_duration.observe(flight.seconds)
        cancelled = self._queue.disconnected_texts(batch)
        if cancelled:
            self._metrics.cancelled_texts["batched"].inc(cancelled)

    def _idle_s(self) -> float:
        """Seconds without a batch until `_on_idle` has work."""
        return PROBE_INTERVAL_S if self._is_written else IDLE_WRITE_S

    def _on_idle(self) -> None:
        if not self._is_written:
            self._write_metrics(time.monotonic())
        models = list(self._models.values())
        if time.monotonic() - self._health.last_success < PROBE_INTERVAL_S or not models:
            return
        self._probed += 1
        model = models[self._probed % len(models)]
        try:
            self._health.watch(model.number, lambda: model.run(model.probe))
            self._health.succeeded()
            self._is_written = False
        except EncoderLost as error:
            self.give_up(error)
        except EncoderError:
            log.exception("the idle probe failed")

    # --- ending ---

    def give_up(self, error: Exception) -> None:
        """End the process because the encoder is lost. The supervisor starts another one."""
        log.critical("the encoder is lost, this process ends: %s", error)
        self._server.close()
        if self._spans is not None:
            self._spans.close()
        self._exit(70)

    def follow(self, control: ControlConnection, load: Callable[[StartModel], None]) -> None:
        """Follow the supervisor's messages in a separate thread, and exit when the supervisor does.

        `load` starts to load one more model, and returns at once.
        """
        while True:
            message = control.receive()
            if message is None:
                self._exit(1)
                return
            if isinstance(message, Drain):
                self._queue.drain()
            elif isinstance(message, LoadModel):
                load(message.model)

    def close(self) -> None:
        """Send the remaining results, then free the encoders."""
        self._server.close()
        self._metrics.write()
        if self._spans is not None:
            self._spans.close()
        for model in self._models.values():
            model.encoder.close()


class Health:
    """Reports the state of engine `index` to the supervisor and the HTTP processes. Times are of CLOCK_MONOTONIC.

    The supervisor reads two numbers of shared memory: the engine's last sign of life, and the start of its forward.
    HTTP processes get an EngineStatus with every message and every second.
    """

    def __init__(
        self,
        index: int,
        counters: SharedCounters,
        busy: BusyTime,
        metrics: EngineMetrics,
        queue_tokens: Callable[[], int],
        rates: Callable[[], list[float]],
    ) -> None:
        """`rates` returns the tokens a second of every model of the server, by number."""
        self._index, self._counters = index, counters
        self._busy, self._metrics, self._queue_tokens, self._rates = busy, metrics, queue_tokens, rates
        self.last_success = 0.0  # end of the last forward that worked
        self._busy_due = 0.0  # next update of engine_busy_ratio

    def succeeded(self) -> None:
        self.last_success = time.monotonic()
        self._metrics.last_success = time.time()

    def watch(self, model: int, work: Callable[[], ResultT]) -> ResultT:
        """Run a forward of a model. The supervisor kills this process if it takes too long.

        Raises EncoderError in place of MemoryError.
        """
        self._counters.forward_model[self._index] = model
        self._counters.forward_since[self._index] = time.monotonic()
        try:
            return work()
        except MemoryError as error:
            raise EncoderError("not enough memory for this batch") from error
        finally:
            self._counters.forward_since[self._index] = 0.0

    def status(self) -> EngineStatus:
        """The engine's status, which is also a sign of life. Any thread may call it."""
        now = time.monotonic()
        self._counters.engine_alive[self._index] = now
        if now >= self._busy_due:
            self._busy_due = now + BUSY_INTERVAL_S
            self._metrics.busy_ratio.set(self._busy.ratio(now))
        return EngineStatus(self._index, self.last_success, self._queue_tokens(), self._rates())
