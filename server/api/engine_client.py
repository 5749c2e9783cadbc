"""The API process's side of the engines: admits requests, sends them, collects their vectors.

A request is admitted while all API processes together have less unanswered than the limit
(server/ipc/shared_counters.py), or when they have nothing unanswered at all. The limit is the token budget, or fewer
tokens where the engines would take longer for it than `--max-queue-seconds`. All of a loop tick's requests leave in one
message. Answers to a large request come in parts, batch by batch.

When an engine is lost, what it still owed is sent again, to whichever engine is ready. The requests that it was running
(server/ipc/shared_counters.py) may have been its end: each runs alone from now on, and is answered 424 when an engine
is lost again while it runs. What only waited is not held to account. What is out of time is answered 503.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from embert.engine import Encoded
from embert.server.api.background import exit_on_error, keep_running
from embert.server.api.request_options import Terms
from embert.server.config import ServeConfig
from embert.server.http.errors import InferenceFailed, Overloaded, ServerError, Unavailable
from embert.server.ipc.control import EngineState
from embert.server.ipc.framing import Channel
from embert.server.ipc.messages import EMBED, TOKENS, EncodeRequest, EngineStatus, Part, Submit, decode_results, encode
from embert.server.ipc.shared_counters import SharedCounters

__all__ = ["Answer", "EngineClient", "Receive"]

log = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[Any]]  # ASGI's
SWEEP_INTERVAL_S = 0.05
LAST_WORDS = 64  # reads of what an engine sent before it was lost; a socket holds no more
LOSSES_MAX = 8  # more are not chance
BULK_SHARE = 0.75  # of the limit: bulk requests leave room for interactive ones
LEAST_BATCHES = 2  # of each engine are admitted at any rate: with fewer it would wait for work between two batches
HEALTH_MAX_AGE_S = 15.0  # an engine that has not finished a forward for this long is not healthy
_RETRY_AFTER_MAX_S = 60


@dataclass(slots=True)
class Answer:
    """Vectors of one request, float32 [n, d] or for token vectors [T, hidden_size], and how long they took."""

    vectors: npt.NDArray[np.float32]
    queue_s: float
    inference_s: float


@dataclass(slots=True, eq=False)
class _Pending:
    id: int
    message: EncodeRequest
    encoded: Encoded
    future: asyncio.Future[Answer]
    receive: Receive
    terms: Terms
    engine: int = -1
    vectors: npt.NDArray[np.float32] | None = None
    texts_left: int = 0
    queue_s: float = math.inf
    inference_s: float = 0.0
    losses: int = 0  # of engines that had it
    watcher: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class _Engine:
    index: int
    state: EngineState
    channel: Channel | None = None
    status: EngineStatus | None = None
    unsent: list[EncodeRequest] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    tokens: int = 0  # sent by this process and not yet answered

    @property
    def ready(self) -> bool:
        return self.state.state == "ready"


class EngineClient:
    """Lives on the event loop of one API process; not thread-safe."""

    def __init__(self, config: ServeConfig, counters: SharedCounters, worker: int) -> None:
        """`worker` is this API process's index in the shared counters."""
        self.draining = False
        self.max_queue_tokens = config.max_queue_tokens or 0  # of the whole server; 0 until an engine tells its batch
        self._config = config
        self._counters, self._worker = counters, worker
        self._engines: dict[int, _Engine] = {}
        self._pending: dict[int, _Pending] = {}
        self._unwatched: deque[_Pending] = deque()
        # The shared counters know requests by their ids alone, so no two API processes may use the same.
        self._ids = itertools.count((os.getpid() << 40) + 1)
        self.admitted_tokens = 0  # by this process, and not yet answered
        self._flush_scheduled = False
        self._loop = asyncio.get_running_loop()
        self._sweeper = keep_running(self._sweep())

    # --- what the routes use ---

    @property
    def pending(self) -> int:
        """Requests not yet answered."""
        return len(self._pending)

    @property
    def engines(self) -> list[EngineState]:
        """The engines' states, by index."""
        return [self._engines[index].state for index in sorted(self._engines)]

    @property
    def ready(self) -> bool:
        """Whether any engine can work."""
        return any(engine.ready for engine in self._engines.values())

    @property
    def connected(self) -> bool:
        """Whether a request would be with an engine at once. A lost one is noticed here before the supervisor tells."""
        return any(engine.ready and engine.status is not None for engine in self._engines.values())

    def unready_reason(self) -> str:
        """Why requests cannot be taken, as a sentence for clients."""
        if self.draining:
            return "the server is shutting down"
        details = [
            "connecting"
            if state.state == "ready"
            else f"{state.state}: {state.detail}"
            if state.detail
            else state.state
            for state in self.engines
        ]
        return f"the engine is not ready ({'; '.join(details) or 'starting'})"

    def health(self) -> tuple[bool, float | None]:
        """Whether inference works, and the age in seconds of the last forward that did (None: none yet)."""
        newest = max(
            (engine.status.last_success for engine in self._engines.values() if engine.ready and engine.status),
            default=None,
        )
        if newest is None:
            return self.ready, None
        age = time.monotonic() - newest
        return age <= HEALTH_MAX_AGE_S, age

    def check_ready(self) -> None:
        """Raise 503 when no request can be taken now."""
        if self.draining:
            raise Unavailable(self.unready_reason(), retry_after_s=1, reason="draining")
        if not self.ready:
            raise Unavailable(self.unready_reason(), retry_after_s=2, reason="loading")

    def check_time(self, terms: Terms) -> None:
        """Raise Unavailable once the deadline has passed."""
        if time.monotonic() > terms.deadline:
            raise self._too_late(terms)

    def check_room(self, least: Callable[[], int], most: int, terms: Terms) -> None:
        """Raise Overloaded for what cannot be admitted, before it is tokenised.

        It has `least()` tokens or more, and hardly more than `most`: `least` is asked where `most` would not fit.
        """
        admitted, limit = self._counters.admitted, self._limit(terms)
        if not admitted or admitted + most <= limit or self.draining or not self.ready:  # of the last two, encode tells
            return
        tokens = least()
        if admitted + tokens > limit:
            raise self._overloaded(admitted, str(tokens) if tokens == most else f"at least {tokens}", limit)

    async def encode(
        self,
        encoded: Encoded,
        receive: Receive,
        terms: Terms,
        *,
        tokens: bool = False,
        dimensions: int = 0,
        normalize: bool = True,
    ) -> Answer:
        """Admit the texts, run them, return their vectors.

        Raises Overloaded over the budget, Unavailable when no engine is ready or time runs out, InferenceFailed when
        the encoder failed on them, CancelledError when the client has left.
        """
        self.check_ready()
        cost = encoded.tokens
        admitted = self._counters.admitted
        limit = self._limit(terms)
        if admitted and admitted + cost > limit:
            raise self._overloaded(admitted, str(cost), limit)
        self.check_time(terms)  # tokenising may have taken that long
        now = time.monotonic()
        message = EncodeRequest(
            next(self._ids),
            TOKENS if tokens else EMBED,
            encoded.ids.tobytes(),
            encoded.lengths.tobytes(),
            dimensions,
            normalize,
            terms.deadline,
            now,
            terms.bulk,
        )
        pending = _Pending(message.id, message, encoded, self._loop.create_future(), receive, terms)
        self._pending[message.id] = pending
        self._unwatched.append(pending)
        self._admit(cost)
        self._send(pending)
        try:
            return await pending.future
        except asyncio.CancelledError:
            self._cancel(pending)
            raise
        finally:
            self._admit(-cost)
            self._pending.pop(message.id, None)
            if pending.watcher is not None:
                pending.watcher.cancel()
                # Its CancelledError holds its frame, and that this request: with its vectors, if we held it too.
                pending.watcher = None

    @property
    def tokens_per_s(self) -> float:
        """The rate at which the engines that are ready work a queue off; 0 while it is not known."""
        return sum(engine.status.tokens_per_s for engine in self._engines.values() if engine.ready and engine.status)

    @property
    def queue_limit(self) -> int:
        """Tokens that may be admitted and not yet answered, as things are; 0 until an engine tells its batch."""
        by_time = self.tokens_per_s * self._config.max_queue_seconds
        if not by_time or by_time >= self.max_queue_tokens:
            return self.max_queue_tokens
        infos = [engine.state.info for engine in self._engines.values() if engine.ready]
        least = LEAST_BATCHES * sum(info.max_batch_tokens for info in infos if info is not None)
        return min(self.max_queue_tokens, max(int(by_time), least))

    def _limit(self, terms: Terms) -> int:
        return int(BULK_SHARE * self.queue_limit) if terms.bulk else self.queue_limit

    def _admit(self, tokens: int) -> None:
        self.admitted_tokens += tokens
        self._counters.admitted_tokens[self._worker] = self.admitted_tokens

    def give_up(self) -> None:
        """Answer everything that is pending with 503: the time to drain is over."""
        for pending in list(self._pending.values()):
            self._fail(pending, Unavailable(self.unready_reason(), retry_after_s=1, reason="draining"))

    # --- engines come and go ---

    def engine_changed(self, state: EngineState) -> None:
        """The supervisor's word on an engine; each start of it has an endpoint of its own."""
        engine = self._engines.setdefault(state.index, _Engine(state.index, state))
        if state.state != "ready" or state.endpoint != engine.state.endpoint:
            for _ in range(LAST_WORDS):
                if engine.channel is None:
                    break
                self._read(engine, engine.channel)
            self._disconnect(engine)
        engine.state = state
        if state.info is not None and not self.max_queue_tokens:
            # Of all engines, also where this process is told of them one by one, as it is when it starts again.
            engines = len(self._counters.engine_alive)
            self.max_queue_tokens = self._config.queue_budget(state.info.max_batch_tokens, engines)
        self._connect(engine)

    def _connect(self, engine: _Engine) -> None:
        """Connect to an engine that is ready, unless we are. Where that fails, the next sweep tries again.

        It sends a status at once, and then gets what waits.
        """
        if engine.channel is not None or not engine.ready:
            return
        try:
            engine.channel = Channel.connect(engine.state.endpoint)
        except OSError as error:  # it just died, or too many files are open
            log.debug("engine %d cannot be reached: %s", engine.index, error)
            return
        self._loop.add_reader(engine.channel.fileno(), exit_on_error(self._read), engine, engine.channel)

    def _disconnect(self, engine: _Engine) -> None:
        """Drop the connection with all that is on the way, send again what the engine owed, or give up on it."""
        if engine.channel is None:
            return
        self._loop.remove_reader(engine.channel.fileno())
        self._loop.remove_writer(engine.channel.fileno())
        engine.channel.close()
        engine.channel, engine.status, engine.tokens = None, None, 0
        never_sent = {message.id for message in engine.unsent}
        engine.unsent.clear()
        engine.cancelled.clear()
        owed = [each for each in self._pending.values() if each.engine == engine.index and not each.future.done()]
        ran = self._counters.running(engine.index)
        for pending in owed:
            pending.engine = -1
            pending.losses += pending.id not in never_sent
            if pending.id in ran and pending.message.alone:
                self._fail(
                    pending, InferenceFailed("inference failed: an engine was lost twice while it ran this request")
                )
                continue
            if pending.losses >= LOSSES_MAX:
                said = f"the engine was lost {LOSSES_MAX} times while it had this request"
                self._fail(pending, Unavailable(said, retry_after_s=5))
                continue
            pending.message.alone = pending.message.alone or pending.id in ran
            pending.vectors, pending.texts_left = None, 0
            # Under a new id: parts that the lost engine sent may still be on their way, and must not count twice.
            del self._pending[pending.id]
            pending.id = pending.message.id = next(self._ids)
            self._pending[pending.id] = pending
            self._send(pending)

    # --- sending ---

    def _send(self, pending: _Pending) -> None:
        engine = min(
            # One that has not sent its status yet may be dying: its socket still takes connections for a moment.
            (engine for engine in self._engines.values() if engine.status is not None),
            # Of equal ones, every API process takes another first.
            key=lambda engine: (engine.tokens, (engine.index - self._worker) % len(self._engines)),
            default=None,
        )
        if engine is None:
            return  # it stays pending, for the engine that comes back
        pending.engine = engine.index
        engine.tokens += pending.encoded.tokens
        engine.unsent.append(pending.message)
        self._schedule_flush()

    def _cancel(self, pending: _Pending) -> None:
        engine = self._engines.get(pending.engine)
        if engine is None or engine.channel is None:
            return
        engine.tokens -= pending.encoded.tokens
        engine.cancelled.append(pending.id)
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(exit_on_error(self._flush))

    def _flush(self) -> None:
        self._flush_scheduled = False
        for engine in self._engines.values():
            if engine.channel is not None and (engine.unsent or engine.cancelled):
                if not engine.channel.send(encode(Submit(engine.unsent, engine.cancelled))):
                    self._loop.add_writer(engine.channel.fileno(), exit_on_error(self._flush_rest), engine.channel)
                engine.unsent, engine.cancelled = [], []

    def _flush_rest(self, channel: Channel) -> None:
        if channel.flush():
            self._loop.remove_writer(channel.fileno())

    # --- receiving ---

    def _read(self, engine: _Engine, channel: Channel) -> None:
        try:
            answers = [decode_results(message) for message in channel.receive()]
        except (EOFError, ValueError, msgspec.MsgspecError) as error:
            if not isinstance(error, EOFError):
                log.error("engine %d sent what is no message, connecting anew: %s", engine.index, error)  # noqa: TRY400
            self._disconnect(engine)
            return
        for results in answers:
            greeted = engine.status is None
            engine.status = results.status
            if greeted:
                for waiting in [each for each in self._pending.values() if each.engine < 0]:
                    self._send(waiting)
            for part in results.parts:
                pending = self._pending.get(part.id)
                if pending is not None and not pending.future.done():
                    self._take(pending, part)

    def _take(self, pending: _Pending, part: Part) -> None:
        if part.error in ("deadline", "cannot_meet_deadline"):
            self._fail(pending, self._too_late(pending.terms, part.message))
            return
        if part.error:
            self._fail(pending, InferenceFailed(f"inference failed: {part.message}"))
            return
        pending.queue_s = min(pending.queue_s, part.queue_s)
        pending.inference_s += part.inference_s
        vectors = np.frombuffer(part.vectors, np.float32)
        lengths = pending.encoded.lengths
        if pending.message.task == TOKENS:
            rows = int(lengths[part.first_text : part.first_text + part.texts].sum())
            first = int(lengths[: part.first_text].sum())
            total = pending.encoded.tokens
        else:
            rows, first, total = part.texts, part.first_text, len(lengths)
        vectors = vectors.reshape(rows, -1)
        if part.texts == len(lengths):
            self._done(pending, vectors)
            return
        if pending.vectors is None:
            pending.vectors = np.empty((total, vectors.shape[1]), np.float32)
            pending.texts_left = len(lengths)
        pending.vectors[first : first + rows] = vectors
        pending.texts_left -= part.texts
        if not pending.texts_left:
            self._done(pending, pending.vectors)

    def _done(self, pending: _Pending, vectors: npt.NDArray[np.float32]) -> None:
        self._engines[pending.engine].tokens -= pending.encoded.tokens
        pending.future.set_result(Answer(vectors, pending.queue_s, pending.inference_s))

    def _fail(self, pending: _Pending, error: ServerError) -> None:
        if pending.engine >= 0:
            self._engines[pending.engine].tokens -= pending.encoded.tokens
        if not pending.future.done():
            pending.future.set_exception(error)

    # --- time and clients ---

    async def _sweep(self) -> None:
        """Requests older than a moment get a watcher for a client that leaves; late ones their 503, engine or not.

        Most requests are answered before this looks at them, and pay nothing.
        """
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            now = time.monotonic()
            while self._unwatched and self._unwatched[0].message.admitted < now - SWEEP_INTERVAL_S:
                pending = self._unwatched.popleft()
                if not pending.future.done():
                    pending.watcher = self._loop.create_task(self._watch(pending))
            for pending in self._pending.values():
                if pending.terms.deadline < now:
                    self._cancel_late(pending)
            for engine in self._engines.values():
                self._connect(engine)

    def _cancel_late(self, pending: _Pending) -> None:
        if pending.future.done():
            return
        self._cancel(pending)
        pending.engine = -1
        self._fail(pending, self._too_late(pending.terms))

    async def _watch(self, pending: _Pending) -> None:
        while (await pending.receive())["type"] != "http.disconnect":
            pass
        if not pending.future.done():
            pending.future.cancel()

    # --- errors with numbers in them ---

    def _too_late(self, terms: Terms, why: str = "") -> Unavailable:
        could = f"cannot be answered in time, {why}: it has" if why else "was not answered within"
        message = f"the request {could} {terms.timeout_s:g} s ({terms.set_by})"
        return Unavailable(message, retry_after_s=self._retry_after_s(), reason="deadline")

    def _overloaded(self, admitted: int, tokens: str, limit: int) -> Overloaded:
        whole, rate = self.queue_limit, self.tokens_per_s
        of_bulk = "" if limit >= whole else f", of which bulk requests may fill {BULK_SHARE:.0%}"
        by_time = f"--max-queue-seconds {self._config.max_queue_seconds:g} at {rate:.0f} tokens/s"
        set_by = by_time if whole < self.max_queue_tokens else "--max-queue-tokens"
        return Overloaded(
            f"the queue holds {admitted} tokens and this request has {tokens}; "
            f"the limit is {whole} ({set_by}){of_bulk}",
            retry_after_s=self._retry_after_s(),
        )

    def _retry_after_s(self) -> int:
        """Whole seconds until the queue is empty, at the rate the engines last worked at."""
        rate = self.tokens_per_s
        return min(_RETRY_AFTER_MAX_S, max(1, math.ceil(self._counters.admitted / rate))) if rate else 1

    async def close(self) -> None:
        """Stop; nothing may be pending."""
        self._sweeper.cancel()
        for engine in self._engines.values():
            self._disconnect(engine)
