"""What an engine process does: requests in, batches through the encoder, vectors out.

Two threads, because a forward must never wait for a request and a request never for a forward:

    receive   socket → scheduler
    main      scheduler → pack → encoder → answers → socket   (the only one that touches the encoder)
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from embert.engine import Encoder, Model, PackedBatch, Task
from embert.engine.errors import EncoderError, EncoderLost
from embert.server.ipc.control import ControlConnection, Drain, StartEngine
from embert.server.ipc.framing import Channel
from embert.server.ipc.messages import TOKENS, EncodeRequest, EngineStatus, Part, Submit
from embert.server.ipc.shared_counters import MAX_BATCHES_IN_FLIGHT, SharedCounters
from embert.server.observability.logs import exit_now
from embert.server.observability.metrics import EngineMetrics
from embert.server.worker.batching import Payload, pack
from embert.server.worker.scheduler import Batch, Request, Scheduler, Slice
from embert.server.worker.socket_server import SocketServer
from embert.server.worker.throughput import ThroughputEstimate

__all__ = ["EngineLoop"]

log = logging.getLogger(__name__)

BUSY_INTERVAL_S = 1.0
PROBE_INTERVAL_S = 5.0  # an idle engine proves itself this often
# Before a batch's expected end the next one is handed over: what that takes, and what expectations may be wrong by.
IN_TIME_S = 0.0005
IN_TIME_SHARE = 0.15
IN_TIME_MOST_S = 0.1  # beside a longer batch the gap is nothing, and an expectation that wrong would cost more

ResultT = TypeVar("ResultT")


Key = tuple[Channel, int]  # who asked, request id


@dataclass(slots=True)
class _Flight:
    """A batch on the encoder."""

    batch: Batch
    ticket: Any  # an EncoderError when it could not be handed over
    started: float
    queued: bool  # others had to wait
    place: int  # on the board
    ended: float = 0.0
    margin_s: float = 0.0  # before its expected end, when the next was handed over in time
    vectors: npt.NDArray[np.float32] | EncoderError | None = None  # once waited for; None: the encoder was lost


class EngineLoop:
    """The threads and what they share. `run` is the main thread's."""

    def __init__(
        self, start: StartEngine, model: Model, encoder: Encoder, exit_process: Callable[[int], Any] = exit_now
    ) -> None:
        config = start.config
        self._index = start.index
        self._counters = SharedCounters(start.counters_fd, config.http_processes, start.engines)
        self._encoder = encoder
        # Where a forward runs while it is waited for, a batch handed over ahead would only be bound earlier.
        self._takes_ahead = encoder.device != "cpu"
        self._exit = exit_process
        self._scheduler = Scheduler(encoder.max_batch_tokens, config.max_batch_requests)
        self._lock = threading.Condition()  # guards the scheduler and the two fields below
        self._running: Counter[Any] = Counter()  # by key: batches that hold texts of it
        self._apart: deque[Batch] = deque()  # each of one request, that must be alone on the encoder
        self._turn_apart = False
        self._gone: set[Key] = set()  # running requests whose client has left
        self._draining = False
        self._places = list(range(MAX_BATCHES_IN_FLIGHT))  # on the board, that no batch has
        for place in self._places:
            self._counters.set_running(self._index, place, ())
        self._throughput = ThroughputEstimate()
        self._last_success = 0.0
        self._busy_due = 0.0  # when engine_busy_ratio is worked out again
        self._probe = PackedBatch(np.zeros(1, np.int32), np.array([0, 1], np.int32))
        self._endpoint = start.endpoint
        facts = {"model": model.model_id, "dtype": encoder.dtype, "backend": encoder.name, "device": encoder.device}
        self._metrics = EngineMetrics(start.index, config.latency_buckets, facts)
        self._server = SocketServer(self._status, self._take, self._forget)

    # --- main thread ---

    def warm_up(self) -> float:
        """Run the smallest batch and the largest, so that no client pays for what is done the first time only.

        Returns how long the largest takes, in seconds: what is known of the engine's speed until there is a queue.
        """
        lengths = [min(64, self._encoder.max_batch_tokens)] * max(1, self._encoder.max_batch_tokens // 64)
        full = PackedBatch(np.zeros(sum(lengths), np.int32), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        for batch in (full, self._probe):
            self._encoder.encode(batch)
        probe_s, full_s = self._shortest_s(self._probe), self._shortest_s(full)
        self._throughput.learn(probe_s, max(0.0, full_s - probe_s) / full.tokens)
        ended = time.monotonic()
        self._throughput.add(ended - full_s, ended, full.tokens, queued=True)
        self._succeeded()
        return full_s

    def _shortest_s(self, batch: PackedBatch) -> float:
        """How long a batch takes; at the best, where batches are handed over in time."""
        lasted_s = []
        for _ in range(3 if self._takes_ahead else 1):
            started = time.monotonic()
            self._encoder.encode(batch)
            lasted_s.append(time.monotonic() - started)
        return min(lasted_s)

    def listen(self) -> None:
        """Take requests from now on, in the receiving thread."""
        self._server.listen(self._endpoint)

    def run(self) -> None:
        """Run batches until drained. A free encoder takes what waits.

        One that works by itself is handed the next batch while it is busy: a full one at once, any other shortly before
        it is expected to be free, or at the latest before the vectors of the last are answered.
        """
        flying: _Flight | None = None
        while True:
            if flying is None:
                batch = self._wait_for_batch()
                if batch is None:
                    return
                flying = self._submit(batch)
                continue
            following = self._submit_ahead(flying, full=True) or self._submit_in_time(flying)
            self._wait(flying)
            if following is None and flying.vectors is not None:
                following = self._submit_ahead(flying, full=False)
            self._finish(flying)
            flying = following

    def _submit_ahead(self, flying: _Flight, *, full: bool) -> _Flight | None:
        """Hand the next batch over before the last is answered; `full`: only one that cannot gain from waiting."""
        if not self._takes_ahead or _is_apart(flying.batch):
            return None
        with self._lock:
            # Those that must be alone wait for a free encoder. With batches handed over there would never be one.
            if self._apart or (full and not self._scheduler.full()):
                return None
            self._answer_late(self._scheduler.expire(time.monotonic()))
            batch = self._scheduled()
        return self._submit(batch) if batch is not None else None

    def _submit_in_time(self, flying: _Flight) -> _Flight | None:
        """Hand over what waits shortly before the running batch is expected to end, so that the encoder need not wait.

        Requests that come afterwards miss that batch, so it is not done earlier than needed; and not at all where
        batches are so short that most of their time would be lost for gathering.
        """
        if not self._takes_ahead or _is_apart(flying.batch):
            return None
        end = self._throughput.expected_end(flying.started, flying.batch.tokens)
        lasts_s = end - time.monotonic()
        if not 2 * IN_TIME_S < lasts_s < IN_TIME_MOST_S:
            return None
        flying.margin_s = max(IN_TIME_S, IN_TIME_SHARE * lasts_s)
        time.sleep(lasts_s - flying.margin_s)
        return self._submit_ahead(flying, full=False)

    def _wait_for_batch(self) -> Batch | None:
        with self._lock:
            while True:
                self._answer_late(self._scheduler.expire(time.monotonic()))
                batch = self._next_batch()
                if batch is not None:
                    return batch
                if self._draining:
                    return None
                if not self._lock.wait(PROBE_INTERVAL_S):
                    self._prove_life()

    def _next_batch(self) -> Batch | None:
        """What runs on a free encoder: in turns, what the scheduler says and what must be alone."""
        self._turn_apart = not self._turn_apart
        if self._turn_apart:
            return self._next_apart() or self._scheduled()
        return self._scheduled() or self._next_apart()

    def _scheduled(self) -> Batch | None:
        """The scheduler's next batch, without those that must be alone."""
        batch = self._scheduler.next_batch()
        self._note_running(batch)
        if batch is None or not any(piece.request.payload.alone for piece in batch.slices):
            return batch
        self._apart += [_batch_of(batch.task, [piece]) for piece in batch.slices if piece.request.payload.alone]
        others = [piece for piece in batch.slices if not piece.request.payload.alone]
        return _batch_of(batch.task, others) if others else None

    def _next_apart(self) -> Batch | None:
        """One that still has somebody and some time to be answered."""
        while self._apart:
            batch = self._apart.popleft()
            request = batch.slices[0].request
            if request.deadline < time.monotonic():
                self._answer_late([request])
            elif request.key not in self._gone and request.payload.reply_to.fileno() >= 0:
                return batch
            self._note_done(batch)
        return None

    def _prove_life(self) -> None:
        started = time.monotonic()
        if started - self._last_success < PROBE_INTERVAL_S:
            return
        self._lock.release()
        try:
            self._waited_for(lambda: self._encoder.encode(self._probe))
            self._succeeded()
        except EncoderLost as error:
            self._give_up(error)
        except EncoderError:
            log.exception("the idle probe failed")
        finally:
            self._lock.acquire()

    def _note_running(self, batch: Batch | None) -> None:
        if batch is not None:
            self._running.update(piece.request.key for piece in batch.slices)
        self._metrics.queue_texts.set(self._scheduler.queue_texts)
        self._metrics.queue_tokens.set(self._scheduler.queue_tokens)

    def _note_done(self, batch: Batch) -> None:
        for piece in batch.slices:
            key: Any = piece.request.key
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
                self._gone.discard(key)

    def _waited_for(self, work: Callable[[], ResultT]) -> ResultT:
        """Do what the supervisor ends this process for if it takes too long. Raises EncoderError for want of memory."""
        self._counters.forward_since[self._index] = time.monotonic()
        try:
            return work()
        except MemoryError as error:
            raise EncoderError("not enough memory for this batch") from error
        finally:
            self._counters.forward_since[self._index] = 0.0

    def _submit(self, batch: Batch) -> _Flight:
        started = time.monotonic()
        queued = self._scheduler.queue_texts > 0
        place = self._places.pop()
        self._counters.set_running(self._index, place, [piece.request.payload.id for piece in batch.slices])
        try:
            ticket: Any = self._waited_for(lambda: self._encoder.submit(pack(batch.slices), batch.task))  # type: ignore[arg-type]
        except EncoderError as error:
            ticket = error
        return _Flight(batch, ticket, started, queued, place)

    def _wait(self, flight: _Flight) -> None:
        ticket, asked = flight.ticket, time.monotonic()
        try:
            if isinstance(ticket, EncoderError):
                raise ticket
            flight.vectors = self._waited_for(lambda: self._encoder.wait(ticket))
        except EncoderLost as error:
            # Of several, the API processes send each again, to be alone then; so only the one at fault ever fails.
            if len(flight.batch.slices) == 1:
                self._fail(flight.batch.slices, error)
            self._give_up(error)
            return
        except EncoderError as error:
            flight.vectors = error
        self._counters.set_running(self._index, flight.place, ())
        self._places.append(flight.place)
        flight.ended = time.monotonic()
        if flight.margin_s:
            self._throughput.looked_for(was_over=flight.ended - asked < flight.margin_s / 5)

    def _finish(self, flight: _Flight) -> None:
        self._settle(flight)
        with self._lock:
            self._note_done(flight.batch)

    def _settle(self, flight: _Flight) -> None:
        batch, vectors, started, ended = flight.batch, flight.vectors, flight.started, flight.ended
        if vectors is None:
            return
        if isinstance(vectors, EncoderError):
            self._isolate(batch, vectors)
        else:
            self._succeeded()
            self._throughput.add(started, ended, batch.tokens, queued=flight.queued)
            self._answer(batch.slices, batch.task, vectors, started, ended)
            self._observe(batch, started, ended)

    def _isolate(self, batch: Batch, error: EncoderError) -> None:
        """A batch failed: halve it until only the requests that fail by themselves get the error."""
        if len(batch.slices) == 1:
            self._fail(batch.slices, error)
            return
        log.warning("a batch of %d texts failed, running it again in halves: %s", batch.texts, error)
        middle = len(batch.slices) // 2
        for half in (batch.slices[:middle], batch.slices[middle:]):
            flight = self._submit(_batch_of(batch.task, half))
            self._wait(flight)
            self._settle(flight)

    def _answer(
        self, slices: list[Slice], task: Any, vectors: npt.NDArray[np.float32], started: float, ended: float
    ) -> None:
        """Rows back to the requests they belong to; a row that is not finite fails its request, and no other."""
        sizes = [piece.tokens if task is Task.TOKENS else piece.stop - piece.start for piece in slices]
        all_finite = bool(np.isfinite(vectors.sum(dtype=np.float64)))
        outgoing: dict[Channel, list[Part]] = {}
        row = 0
        for piece, size in zip(slices, sizes, strict=True):
            payload: Payload = piece.request.payload
            rows = slice(row, row + size)
            row += size
            if not all_finite and not np.isfinite(vectors[rows]).all():
                self._fail([piece], EncoderError("the encoder returned a vector that is not finite"))
                continue
            answer = vectors[rows]
            if task is Task.EMBED and payload.dimensions:
                answer = answer[:, : payload.dimensions]
            part = Part(
                payload.id,
                piece.start,
                piece.stop - piece.start,
                answer.tobytes(),
                started - payload.admitted,
                ended - started,
            )
            outgoing.setdefault(payload.reply_to, []).append(part)
        for channel, parts in outgoing.items():
            self._server.send(channel, parts)

    def _fail(self, slices: list[Slice], error: Exception) -> None:
        log.error("%d request(s) failed: %s", len(slices), error)
        for piece in slices:
            payload: Payload = piece.request.payload
            with self._lock:
                self._scheduler.cancel(piece.request.key)  # its other texts need not run
            part = Part(payload.id, piece.start, piece.stop - piece.start, b"", 0.0, 0.0, "backend", str(error))
            self._server.send(payload.reply_to, [part])

    def _answer_late(self, late: list[Request]) -> None:
        for request in late:
            payload: Payload = request.payload
            self._server.send(payload.reply_to, [Part(payload.id, 0, 0, b"", 0.0, 0.0, "deadline")])

    def _observe(self, batch: Batch, started: float, ended: float) -> None:
        metrics = self._metrics
        metrics.batches.inc()
        metrics.batch_texts.observe(batch.texts)
        metrics.batch_tokens.observe(batch.tokens)
        metrics.fill_ratio.observe(batch.tokens / self._encoder.max_batch_tokens)
        metrics.inference_duration.observe(ended - started)
        for piece in batch.slices:
            metrics.queue_duration.observe(max(0.0, started - piece.request.payload.admitted))
        with self._lock:
            gone = [piece for piece in batch.slices if piece.request.key in self._gone]
        if gone:
            metrics.cancelled_texts["batched"].inc(sum(piece.stop - piece.start for piece in gone))

    def _succeeded(self) -> None:
        self._last_success = time.monotonic()
        self._metrics.last_success.set(time.time())

    def _give_up(self, error: Exception) -> None:
        """The encoder is lost: say so, let the answers out, and end; the supervisor starts another process."""
        log.critical("the encoder is lost, this process ends: %s", error)
        self._server.close()
        self._exit(70)

    def _status(self) -> EngineStatus:
        """How this engine is; asked with every message that is sent, and every second."""
        now = time.monotonic()
        self._counters.engine_alive[self._index] = now
        if now >= self._busy_due:
            self._busy_due = now + BUSY_INTERVAL_S
            self._metrics.busy_ratio.set(self._throughput.busy_ratio(now))
        return EngineStatus(
            self._index, self._last_success, self._scheduler.queue_tokens, self._throughput.tokens_per_s
        )

    # --- receiving thread ---

    def _take(self, channel: Channel, submit: Submit) -> None:
        with self._lock:
            for request in submit.requests:
                self._accept(channel, request)
            for id_ in submit.cancelled:
                self._cancel((channel, id_))
            self._note_running(None)
            self._lock.notify()

    def _forget(self, channel: Channel) -> None:
        """Nobody waits for its answers any more."""
        with self._lock:
            for key in self._scheduler.waiting():
                if key[0] is channel:  # type: ignore[index]
                    self._cancel(key)  # type: ignore[arg-type]
            self._note_running(None)

    def _accept(self, channel: Channel, request: EncodeRequest) -> None:
        payload = Payload(
            channel,
            request.id,
            np.frombuffer(request.ids, np.int32),
            request.dimensions,
            request.normalize,
            request.admitted,
            request.alone,
        )
        lengths = np.frombuffer(request.lengths, np.int32).tolist()
        task = Task.TOKENS if request.task == TOKENS else Task.EMBED
        wait_s = self._least_wait_s(len(payload.ids), request)
        if wait_s and time.monotonic() + wait_s > request.deadline:
            said = f"the work queued before it takes {wait_s:.2g} s"
            self._server.send(channel, [Part(request.id, 0, 0, b"", 0.0, 0.0, "cannot_meet_deadline", said)])
            return
        key = channel, request.id
        try:
            self._scheduler.add(Request(key, lengths, task, request.deadline, request.bulk, payload))
        except ValueError as error:
            self._server.send(channel, [Part(request.id, 0, 0, b"", 0.0, 0.0, "backend", str(error))])

    def _least_wait_s(self, tokens: int, request: EncodeRequest) -> float:
        """How long a new request of so many tokens takes at least, at the rate the queue is worked off with."""
        rate, queued = self._throughput.tokens_per_s, self._scheduler.queue_tokens
        if not queued or not rate or (queued + tokens) / rate <= request.deadline - request.admitted:
            return 0.0
        return (self._scheduler.ahead(tokens, bulk=request.bulk) + tokens) / rate

    def _cancel(self, key: Key) -> None:
        dropped = self._scheduler.cancel(key)
        if dropped:
            self._metrics.cancelled_texts["queued"].inc(dropped)
        if key in self._running:
            self._gone.add(key)

    # --- the supervisor's line ---

    def follow(self, control: ControlConnection, runtime_folder: str) -> None:
        """Obey the supervisor; end with it. Runs in a thread of its own."""
        while True:
            message = control.receive()
            if message is None:
                shutil.rmtree(runtime_folder, ignore_errors=True)
                self._exit(1)
                return
            with self._lock:
                if isinstance(message, Drain):
                    self._draining = True
                self._lock.notify()

    def close(self) -> None:
        """Send what is left and give everything back."""
        self._server.close()
        self._encoder.close()


def _batch_of(task: Any, slices: list[Slice]) -> Batch:
    tokens, texts = sum(piece.tokens for piece in slices), sum(piece.stop - piece.start for piece in slices)
    return Batch(task, slices, tokens, texts)


def _is_apart(batch: Batch) -> bool:
    return len(batch.slices) == 1 and bool(batch.slices[0].request.payload.alone)
