"""The requests that wait for the encoder and the batches that run on it, shared by two threads under one lock.

The thread that reads the sockets (socket_server.py) adds and cancels; the device loop takes batches. A request that ran
when an engine was lost arrives with `isolated` set. It runs in a separate batch, and no batch is submitted behind or
before it, so if an engine is lost again the cause is known.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence

import numpy as np

from embert.server.engine_worker.batches import batch_of, pair_lengths
from embert.server.engine_worker.lanes import Request
from embert.server.engine_worker.loaded_model import LoadedModel
from embert.server.engine_worker.scheduler import Batch, Scheduler
from embert.server.ipc.channel import Channel, EncodeRequest, PartialResult, Submit
from embert.server.observability.metrics import EngineMetrics

_ID_BYTES = 4  # int32
SHORT_TOKENS = 128  # of an interactive text for whose sake full batches are formed late
INTERACTIVE_MEMORY_S = 10.0  # after an interactive request, in which another one is expected


class WorkQueue:
    """A scheduler with a lock, deadlines and disconnects. Times are seconds of CLOCK_MONOTONIC."""

    def __init__(
        self, metrics: EngineMetrics, send: Callable[[Channel, list[PartialResult]], None], wake: Callable[[], None]
    ) -> None:
        """`send` sends the errors of requests that cannot run; `wake` ends a wait of the device loop."""
        self._scheduler = Scheduler()
        self._models: dict[int, LoadedModel] = {}
        self._metrics, self._send, self._wake = metrics, send, wake
        self._lock = threading.RLock()  # guards the scheduler and the fields below
        self._running: set[Batch] = set()  # includes those in `_isolated`
        self._disconnected: set[Hashable] = set()  # running requests whose client has disconnected
        self._isolated: deque[Batch] = deque()  # batches of one request each
        self._isolated_next = False
        self._draining = False
        self._interactive_at = -INTERACTIVE_MEMORY_S  # when the last interactive request arrived
        self._short_tokens: dict[Hashable, int] = {}  # limit of a short text, by model
        self._short_at = -INTERACTIVE_MEMORY_S  # when the last interactive request of a short text arrived
        self._published: dict[int, tuple[int, int]] = {}  # waiting texts and tokens in the gauges, by model

    def tokens(self) -> int:
        """Tokens waiting for a batch. Reads one number, without the lock."""
        return self._scheduler.queue_tokens

    def texts(self) -> int:
        """Texts waiting for a batch. Reads one number, without the lock."""
        return self._scheduler.queue_texts

    def expects_interactive(self) -> bool:
        """True while interactive requests arrive. Reads one number, without the lock."""
        return time.monotonic() - self._interactive_at < INTERACTIVE_MEMORY_S

    def expects_short(self) -> bool:
        """True while interactive requests of a short text arrive. Reads one number, without the lock."""
        return time.monotonic() - self._short_at < INTERACTIVE_MEMORY_S

    # --- loading threads ---

    def add_model(self, model: LoadedModel) -> None:
        """Accept requests for a model from now on."""
        with self._lock:
            self._models[model.number] = model
            self._scheduler.add_model(model.number, model.limits)
            self._short_tokens[model.number] = min(SHORT_TOKENS, model.limits.small_tokens)

    # --- the thread that reads the sockets ---

    def submit(self, channel: Channel, message: Submit) -> None:
        """Queue the requests of a message, and drop those that it cancels."""
        with self._lock:
            now = time.monotonic()
            slowest = min([model.throughput.tokens_per_s for model in self._models.values()], default=0.0)
            for request in message.requests:
                self._accept(channel, request, now, slowest)
            for id_ in message.cancelled:
                self._cancel(id_)

    def disconnect(self, channel: Channel) -> None:
        """Drop all requests of an HTTP process, which has exited."""
        with self._lock:
            for request in self._scheduler.waiting():
                if request.channel is channel:
                    self._cancel(request.key)
            self.publish()

    def _accept(self, channel: Channel, message: EncodeRequest, now: float, slowest: float) -> None:
        """Queue a request. `slowest` are the tokens a second of the slowest model, 0 if one is unknown."""
        tokens = len(message.ids) // _ID_BYTES
        one_text = len(message.lengths) == _ID_BYTES  # most requests
        lengths = [tokens] if one_text else np.frombuffer(message.lengths, np.int32).tolist()
        prefix = message.prefix
        queries: Sequence[int] = ()
        if message.queries:  # a query and a document are one text
            prefix, lengths, queries = pair_lengths(lengths, message.queries)
        tokens -= message.prefix * (len(lengths) - 1)
        if not message.low_priority:
            self._interactive_at = now
        if message.model not in self._models:
            self._fail(channel, message, "backend", f"model {message.model} is not loaded on this engine")
            return
        if one_text and tokens <= self._short_tokens[message.model] and not message.low_priority:
            self._short_at = now
        waiting = self._scheduler.queue_tokens
        if waiting and waiting + tokens > slowest * (message.deadline - now):  # otherwise it is in time
            wait_s = self._least_wait_s(tokens, message)
            if wait_s and now + wait_s > message.deadline:
                detail = f"the work queued before it takes {wait_s:.2g} s"
                self._fail(channel, message, "cannot_meet_deadline", detail)
                return
        try:
            self._scheduler.add(
                Request(
                    message.id,
                    lengths,
                    message.model,
                    message.deadline,
                    message.low_priority,
                    channel,
                    message,
                    prefix,
                    queries,
                )
            )
        except ValueError as error:
            self._fail(channel, message, "backend", str(error))

    def _fail(self, channel: Channel, message: EncodeRequest, error: str, detail: str = "") -> None:
        self._send(channel, [PartialResult.failure(message.id, error, detail)])

    def _least_wait_s(self, tokens: int, request: EncodeRequest) -> float:
        """Lower bound of the seconds until a new request of `tokens` tokens is done; 0 while rates are unknown.

        Models share the device's time equally, so each of the others runs as long as this request's, or until it has
        nothing left.
        """
        scheduler, low_priority = self._scheduler, request.low_priority
        rates = {number: model.throughput.tokens_per_s for number, model in self._models.items()}
        rate = rates.pop(request.model)
        if not rate:
            return 0.0
        own_s = (scheduler.ahead(request.model, tokens, low_priority=low_priority) + tokens) / rate
        waiting = {number: scheduler.tokens_of(number, low_priority=low_priority) for number in rates}
        return own_s + sum(min(own_s, waiting[number] / other) for number, other in rates.items() if other)

    def _cancel(self, key: Hashable) -> None:
        dropped = self._scheduler.cancel(key)
        if dropped:
            self._metrics.cancelled_texts["queued"].inc(dropped)
        if any(piece.request.key == key for batch in self._running for piece in batch.slices):
            self._disconnected.add(key)

    # --- control thread ---

    def drain(self) -> None:
        """Make `wait_for_batch` return None once nothing waits."""
        with self._lock:
            self._draining = True
        self._wake()

    # --- device loop ---

    def wait_for_batch(
        self, receive: Callable[[float], bool], idle_s: Callable[[], float], on_idle: Callable[[], None]
    ) -> Batch | None:
        """Wait for a batch for a free encoder; None once drained and empty.

        `receive` reads messages, for which it waits a number of seconds; it returns False if none arrive. `on_idle`
        runs whenever none have arrived for `idle_s()` seconds.
        """
        while True:
            with self._lock:
                self._fail_expired()
                batch = self._next_batch()
                if batch is not None:
                    return batch
                if self._draining:
                    return None
            if not receive(idle_s()):
                on_idle()

    def full(self) -> bool:
        with self._lock:
            return self._scheduler.full()

    def take_ahead(self, *, full: bool, low_priority: bool = True, exclude: Collection[int] = ()) -> Batch | None:
        """A batch to submit behind a running one; with `full` only one that cannot gain from waiting.

        Returns None if a low-priority request leads the next batch and `low_priority` is false, or its model is in
        `exclude`. Another batch does not take its place.
        """
        with self._lock:
            self._fail_expired()  # first: it may change which queue is next
            # Isolated batches need a free encoder, which would never come while batches are submitted ahead.
            if self._isolated or (full and not self._scheduler.full()):
                return None
            queue = self._scheduler.next_queue()
            if queue is None or queue[0] in exclude or (queue[1] and not low_priority):
                return None
            return self._scheduled()

    def done(self, batch: Batch) -> None:
        """Forget a batch whose responses have been sent, or that has failed."""
        with self._lock:
            self._running.discard(batch)
            if self._disconnected:
                self._disconnected &= {piece.request.key for running in self._running for piece in running.slices}

    def settle(self, batch: Batch, seconds: float) -> None:
        with self._lock:
            self._scheduler.settle(batch, seconds)

    def drop(self, key: Hashable) -> None:
        """Drop the waiting texts of a request that has failed."""
        with self._lock:
            self._scheduler.cancel(key)

    def disconnected_texts(self, batch: Batch) -> int:
        """Texts of a running batch whose client has disconnected."""
        if not self._disconnected:
            return 0
        with self._lock:
            gone = [piece for piece in batch.slices if piece.request.key in self._disconnected]
        return sum(piece.stop - piece.start for piece in gone)

    def _next_batch(self) -> Batch | None:
        """The next batch for a free encoder. The scheduler's batches and isolated batches alternate."""
        self._isolated_next = not self._isolated_next
        if self._isolated_next and (batch := self._next_isolated()):
            return batch
        return self._scheduled() or self._next_isolated()  # all requests of the scheduler's batch may be isolated

    def _scheduled(self) -> Batch | None:
        """The scheduler's next batch, without isolated requests, which go to `_isolated`."""
        batch = self._scheduler.next_batch()
        if batch is None:
            return None
        isolated = [piece for piece in batch.slices if piece.request.message.isolated]
        if not isolated:
            self._running.add(batch)
            return batch
        batches = [batch_of(batch.model, [piece]) for piece in isolated]
        self._isolated += batches
        self._running.update(batches)
        others = [piece for piece in batch.slices if not piece.request.message.isolated]
        if not others:
            return None
        batch = batch_of(batch.model, others)
        self._running.add(batch)
        return batch

    def _next_isolated(self) -> Batch | None:
        """The next isolated batch whose client is still connected and whose deadline has not passed."""
        while self._isolated:
            batch = self._isolated.popleft()
            request = batch.slices[0].request
            if request.deadline < time.monotonic():
                self._fail(request.channel, request.message, "deadline")
            elif request.key not in self._disconnected and request.channel.fileno() >= 0:
                return batch
            self.done(batch)
        return None

    def _fail_expired(self) -> None:
        for request in self._scheduler.expire(time.monotonic()):
            self._fail(request.channel, request.message, "deadline")

    def publish(self) -> None:
        """Update the gauges of the queue. They cost as much as a request, so it happens ten times a second."""
        with self._lock:
            for number, model in self._models.items():
                waiting = self._scheduler.texts_of(number), self._scheduler.tokens_of(number, low_priority=True)
                if waiting != self._published.get(number):  # an idle model costs no gauge
                    self._published[number] = waiting
                    metrics = self._metrics.of(model.name)
                    metrics.queue_texts.set(waiting[0])
                    metrics.queue_tokens.set(waiting[1])
