"""Routes requests to engines, and handles lost engines and expired deadlines.

An engine gets requests for the models that are ready there. When it is lost, its unfinished requests go to another
engine that has the model, or get 503 if there is none. The requests that it was running
(server/ipc/shared_counters.py) may have caused the loss: from then on each runs isolated, in a separate batch, and
gets 424 if an engine is lost again while it runs. A request that only waited is resent unchanged. A request past
its deadline gets 503.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from embert.engine import Encoded, Task, TaskOutput
from embert.engine.batch import cumulative
from embert.engine.models.flops import PLAIN_TOKENS
from embert.engine.prefixes import common_prefix
from embert.engine.tasks import ALL_TASKS
from embert.server.engine_client.admission import Admission
from embert.server.engine_client.background import keep_running
from embert.server.engine_client.connection import EngineConnection
from embert.server.http.errors import InferenceFailed, ServerError, TooManyWeights, Unavailable
from embert.server.http.request_head import RequestOptions
from embert.server.ipc.channel import EncodeRequest, PartialResult, Results, TaskRows, TextRows
from embert.server.ipc.control import EngineState, ModelInfo, StartModel
from embert.server.ipc.shared_counters import SharedCounters

if TYPE_CHECKING:
    from embert.server.observability.tracing.request_trace import RequestTrace


SWEEP_INTERVAL_S = 0.05
LOSSES_MAX = 8  # engines lost while they held one request
HEALTH_MAX_AGE_S = (
    15.0  # an engine whose last forward that worked ended this long before the next, or now, is not healthy
)
_TASKS = {int(task): task for task in ALL_TASKS}  # a look-up costs a tenth of a call of the enumeration

# ASGI receive, to notice a client that leaves. None: then the task of the request is cancelled.
Receive = Callable[[], Awaitable[Any]] | None


@dataclass(slots=True)
class EncodeResult:
    """The rows of one request, by task, and their times."""

    rows: dict[Task, TaskOutput]
    queue_s: float
    inference_s: float
    engine: int = -1  # index of the engine that ran the last of its texts
    token_ids: npt.NDArray[np.int32] | None = None  # of MULTI's rows

    @property
    def vectors(self) -> npt.NDArray[np.float32]:
        """The rows' values of a request of one task."""
        (rows,) = self.rows.values()
        return rows.values


@dataclass(slots=True, eq=False)
class PendingRequest:
    """An admitted request without a result."""

    id: int  # changes when an engine is lost
    message: EncodeRequest
    encoded: Encoded
    future: asyncio.Future[EncodeResult]
    receive: Receive
    options: RequestOptions
    engine: int = -1  # the index of the engine that has it; -1: none
    parts: list[tuple[int, dict[Task, TaskOutput]]] = field(default_factory=list)  # of the result: first text, rows
    tokens: int = field(init=False)
    texts_left: int = field(init=False)
    inference_s: float = 0.0
    ended_s: float = 0.0  # from its admission to the end of its last batch so far
    last_engine: int = -1  # the engine that it was sent to last
    losses: int = 0  # engines lost while they held it
    watcher: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.tokens, self.texts_left = self.encoded.tokens, self.encoded.sequences - self.message.queries

    def add(
        self, first_text: int, texts: int, rows: dict[Task, TaskOutput], queue_s: float, inference_s: float
    ) -> EncodeResult | None:
        """Add the rows of some texts. Returns the result once all are here."""
        self.inference_s += inference_s
        self.ended_s = max(self.ended_s, queue_s + inference_s)
        self.texts_left -= texts
        if self.texts_left or self.parts:
            self.parts.append((first_text, rows))
            if self.texts_left:
                return None
            parts = [rows for _, rows in sorted(self.parts, key=lambda part: part[0])]
            rows = {task: TaskOutput.concatenate([part[task] for part in parts]) for task in parts[0]}
        # A model runs one batch of an engine at a time, so what is not a batch of this request is its wait for one.
        return EncodeResult(rows, max(0.0, self.ended_s - self.inference_s), self.inference_s, self.last_engine)

    def restart(self, request_id: int) -> None:
        """Forget the parts that a lost engine sent. Late parts carry the old id, so they are ignored."""
        self.id = self.message.id = request_id
        self.parts.clear()
        self.texts_left = self.encoded.sequences - self.message.queries


class Router:
    """Sends requests to engines. Lives on the event loop of one HTTP process; not thread-safe."""

    def __init__(self, models: Sequence[StartModel], counters: SharedCounters, http_index: int) -> None:
        """`models` are the server's, by number; `http_index` is this HTTP process's index in the counters."""
        self._engines: dict[int, EngineConnection] = {}
        self.admissions = [  # by number of the model
            Admission(
                model.config, counters, http_index, self._engines, model.number, model.name if len(models) > 1 else ""
            )
            for model in models
        ]
        # By number: what a model is on the engines, once one has it.
        self.infos: list[ModelInfo | None] = [None] * len(models)
        self.counters, self._http_index = counters, http_index
        self._pending: dict[int, PendingRequest] = {}
        # Engines report what they run by request ids only, so no two HTTP processes may use the same id.
        self._ids = itertools.count((os.getpid() << 40) + 1)
        self._loop = asyncio.get_running_loop()
        self._sweeper = keep_running(self._sweep())

    # --- what the routes use ---

    @property
    def pending(self) -> int:
        return len(self._pending)

    def connected(self, model: int) -> bool:
        """True if an engine would get a model's request at once. False before the supervisor reports a lost engine."""
        return any(model in engine.running and engine.status is not None for engine in self._engines.values())

    @property
    def draining(self) -> bool:
        return any(admission.draining for admission in self.admissions)

    def drain(self) -> None:
        for admission in self.admissions:
            admission.draining = True

    def health(self) -> tuple[bool, float | None]:
        """True if inference works, and the age in seconds of the last forward that worked (None: none yet)."""
        successes = {
            engine.index: engine.status.last_success
            for engine in self._engines.values()
            if engine.ready and engine.status is not None
        }
        if not successes:
            return any(admission.ready for admission in self.admissions), None
        now = time.monotonic()
        # A forward of a long text on a CPU may take long. The supervisor ends one that hangs.
        is_healthy = any(
            (self.counters.forward_since[index] or now) - last <= HEALTH_MAX_AGE_S for index, last in successes.items()
        )
        return is_healthy, now - max(successes.values())

    async def encode(
        self,
        encoded: Encoded,
        receive: Receive,
        options: RequestOptions,
        *,
        model: int = 0,
        tasks: Task = Task.EMBED,
        dimensions: int = 0,
        normalize: bool = True,
        queries: int = 0,
        note_failure: Callable[[int, float], None] | None = None,
        trace: RequestTrace | None = None,
    ) -> EncodeResult:
        """Admit texts for the model of this number, run them, return their rows. `trace`: of a sampled request.

        With `queries`, the number of texts that are queries (EncodeRequest), the other texts want CLASSIFY.

        Raises Overloaded over the budget, Unavailable when the model is ready on no engine or time runs out,
        InferenceFailed when the encoder failed on them, TooManyWeights, CancelledError when the client has left. Once
        they are admitted, `note_failure` gets the engine that had them last (-1: none) and the seconds since.
        """
        admission = self.admissions[model]
        tokens, prefix = encoded.tokens, 0
        if len(encoded.lengths) > 1:
            prefix = self._prefix(encoded, tasks, model)
        if prefix or tokens > PLAIN_TOKENS:
            tokens = admission.tokens_of(encoded, prefix)
        cost = admission.check(tokens, options)
        now = time.monotonic()
        message = EncodeRequest(
            next(self._ids),
            tasks,
            encoded.ids.tobytes(),
            encoded.lengths.tobytes(),
            b"" if encoded.token_types is None else encoded.token_types.tobytes(),
            dimensions,
            normalize,
            options.deadline,
            now,
            options.low_priority,
            adapter=encoded.adapter,
            model=model,
            trace=b"" if trace is None else trace.context,
            prompt_tokens=encoded.prompt_tokens,
            queries=queries,
            prefix=prefix,
        )
        pending = PendingRequest(message.id, message, encoded, self._loop.create_future(), receive, options)
        self._pending[message.id] = pending
        admission.add(cost)
        self._send(pending)
        try:
            return await pending.future
        except BaseException as error:
            # The engine records the wait in the queue of what it runs.
            is_unserved = isinstance(error, asyncio.CancelledError | Unavailable)
            if trace is not None and is_unserved and not self._has_run(pending):
                trace.stage("queue", now, time.monotonic(), str(error) or "the client has left")
            if isinstance(error, asyncio.CancelledError):
                self._cancel(pending)
            if note_failure is not None:
                note_failure(pending.last_engine, time.monotonic() - now)
            raise
        finally:
            admission.add(-cost)
            self._pending.pop(message.id, None)
            if pending.watcher is not None:
                pending.watcher.cancel()
                # The watcher's CancelledError holds its frame, and the frame this request. Without this line the
                # request would hold the watcher: a cycle that keeps the vectors in memory.
                pending.watcher = None
            # The future holds the exception that it raised here, whose traceback holds this frame and its callers',
            # with the texts: another cycle, if the frame held the future.
            del pending

    def _prefix(self, encoded: Encoded, tasks: Task, model: int) -> int:
        """Number of first tokens that a batch has once for all texts of the request."""
        info = self.infos[model]
        if info is None or encoded.token_types is not None:
            return 0
        return common_prefix(encoded.ids, encoded.lengths, tasks, info.sharing)

    def _has_run(self, pending: PendingRequest) -> bool:
        """True if texts of the request have run or are running."""
        return bool(pending.parts) or any(pending.id in self.counters.running(index) for index in self._engines)

    def give_up(self, *, unready: bool = False) -> None:
        """Fail all pending requests with 503, or with `unready` those for models that are not ready.

        The time to drain is over, or no engine is started again.
        """
        for pending in list(self._pending.values()):
            admission = self.admissions[pending.message.model]
            if not unready or not admission.ready:
                self._fail(pending, Unavailable(admission.unready_reason(), retry_after_s=1, reject_reason="draining"))

    # --- engines come and go ---

    def engine_changed(self, state: EngineState) -> None:
        """Store the supervisor's report on an engine, or on a model there; each start has a new endpoint."""
        engine = self._engines.get(state.index)
        if engine is None:
            engine = EngineConnection(state, self._send_waiting, self._take, self._resend)
            self._engines[state.index] = engine
        if state.state != "ready" or state.endpoint != engine.state.endpoint:
            engine.read_rest()
            engine.disconnect()
        engine.update(state)
        for admission in self.admissions:
            admission.note(state)
        self.infos = [self._info(model) for model in range(len(self.admissions))]
        engine.connect()
        self._take_back(engine)
        self._send_waiting()
        self._fail_unservable()

    def _info(self, model: int) -> ModelInfo | None:
        states = (self._engines[index].state.models.get(model) for index in sorted(self._engines))
        return next((state.info for state in states if state is not None and state.info is not None), None)

    def _take_back(self, engine: EngineConnection) -> None:
        """Send an engine's requests for models that it does not run any more to another engine."""
        for pending in list(self._pending.values()):
            if pending.engine == engine.index and pending.message.model not in engine.running:
                engine.cancel(pending.id, pending.tokens)
                pending.engine = -1
                self._renew(pending)
                self._send(pending)

    def _fail_unservable(self) -> None:
        """Fail requests for models that have failed on every engine."""
        for pending in list(self._pending.values()):
            admission = self.admissions[pending.message.model]
            if pending.engine < 0 and admission.failed:
                self._fail(pending, admission.unready())

    def _resend(self, engine: EngineConnection, never_sent: set[int]) -> None:
        """Resend the unfinished requests of a lost engine, or give up on them."""
        requests = [
            request
            for request in self._pending.values()
            if request.engine == engine.index and not request.future.done()
        ]
        ran = self.counters.running(engine.index)
        for pending in requests:
            pending.engine = -1
            pending.losses += pending.id not in never_sent
            if pending.id in ran and pending.message.isolated:
                detail = "inference failed: an engine was lost twice while it ran this request"
                self._fail(pending, InferenceFailed(detail))
                continue
            if pending.losses >= LOSSES_MAX:
                detail = f"the engine was lost {LOSSES_MAX} times while it had this request"
                self._fail(pending, Unavailable(detail, retry_after_s=5))
                continue
            pending.message.isolated = pending.message.isolated or pending.id in ran
            self._renew(pending)
            self._send(pending)

    def _renew(self, pending: PendingRequest) -> None:
        """Give a request a new id: late results carry the old one."""
        del self._pending[pending.id]
        pending.restart(next(self._ids))
        self._pending[pending.id] = pending

    # --- requests out, results in ---

    def _send(self, pending: PendingRequest) -> None:
        model = pending.message.model
        # An engine that has not greeted yet may be dying: its socket accepts connections for a moment longer.
        able = [engine for engine in self._engines.values() if engine.status is not None and model in engine.running]
        engine = able[0] if len(able) == 1 else min(able, key=self._load_of, default=None)
        if engine is None:
            return  # pending until an engine with the model greets
        pending.engine = pending.last_engine = engine.index
        engine.send(pending.message, pending.tokens)

    def _load_of(self, engine: EngineConnection) -> tuple[int, int]:
        """The sort key of an engine; among equally loaded ones, each HTTP process prefers a different one."""
        return engine.tokens, (engine.index - self._http_index) % len(self._engines)

    def _send_waiting(self) -> None:
        for waiting in [request for request in self._pending.values() if request.engine < 0]:
            self._send(waiting)

    def _cancel(self, pending: PendingRequest) -> None:
        engine = self._engines.get(pending.engine)
        if engine is not None:
            engine.cancel(pending.id, pending.tokens)

    def _take(self, results: Results) -> None:
        for part in results.parts:
            pending = self._pending.get(part.id)
            if pending is None or pending.future.done():
                continue
            if part.error:
                self._fail(pending, self._error(part, pending))
            else:
                rows = {_TASKS[message.task]: _rows(message, part.texts) for message in part.rows}
                self._add(pending, part.first_text, part.texts, rows, part.queue_s, part.inference_s)
        if results.rows is not None:
            self._take_rows(results.rows)

    def _take_rows(self, rows: TextRows) -> None:
        """Split the rows of a batch between its requests, without copying them."""
        task, texts = _TASKS[rows.task], rows.texts
        values = np.frombuffer(rows.values, np.float32).reshape(sum(texts), -1)
        first, inference_s = 0, rows.ended - rows.started
        for id_, first_text, count in zip(rows.ids, rows.first_texts, texts, strict=True):
            pending = self._pending.get(id_)
            if pending is not None and not pending.future.done():
                own = {task: TaskOutput.one_each(values[first : first + count])}
                queue_s = rows.started - pending.message.admitted
                self._add(pending, first_text, count, own, queue_s, inference_s)
            first += count

    def _add(
        self,
        pending: PendingRequest,
        first: int,
        texts: int,
        rows: dict[Task, TaskOutput],
        queue_s: float,
        inference_s: float,
    ) -> None:
        result = pending.add(first, texts, rows, queue_s, inference_s)
        if result is not None:
            self._engines[pending.engine].tokens -= pending.tokens
            pending.future.set_result(result)

    def _error(self, part: PartialResult, pending: PendingRequest) -> ServerError | TooManyWeights:
        if part.error in ("deadline", "cannot_meet_deadline"):
            return self.admissions[pending.message.model].too_late(pending.options, part.message)
        if part.error == "weights":
            return TooManyWeights(part.weights)
        return InferenceFailed(f"inference failed: {part.message}")

    def _fail(self, pending: PendingRequest, error: ServerError | TooManyWeights) -> None:
        if pending.engine >= 0:
            self._engines[pending.engine].tokens -= pending.tokens
        if not pending.future.done():
            pending.future.set_exception(error)

    # --- time and clients ---

    async def _sweep(self) -> None:
        """Watch the clients of requests older than a moment, fail late requests with 503, connect to engines.

        A periodic sweep replaces per-request timers: most requests end before it sees them.
        """
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            now = time.monotonic()
            old = now - SWEEP_INTERVAL_S
            for pending in self._pending.values():
                if pending.receive is not None and pending.watcher is None and pending.message.admitted < old:
                    pending.watcher = self._loop.create_task(self._watch(pending, pending.receive))
                if pending.options.deadline < now:
                    self._cancel_late(pending)
            for engine in self._engines.values():
                engine.connect()

    def _cancel_late(self, pending: PendingRequest) -> None:
        if pending.future.done():
            return
        self._cancel(pending)
        pending.engine = -1
        self._fail(pending, self.admissions[pending.message.model].too_late(pending.options))

    async def _watch(self, pending: PendingRequest, receive: Callable[[], Awaitable[Any]]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not pending.future.done():
            pending.future.cancel()

    async def close(self) -> None:
        """Stop; nothing may be pending."""
        self._sweeper.cancel()
        for engine in self._engines.values():
            engine.disconnect()


def _rows(message: TaskRows, texts: int) -> TaskOutput:
    values = np.frombuffer(message.values, np.float32)
    if not message.counts:
        return TaskOutput.one_each(values.reshape(texts, -1))
    offsets = cumulative(np.frombuffer(message.counts, np.int32))
    if message.task == Task.SPARSE:
        return TaskOutput(values.reshape(-1, 1), offsets, np.frombuffer(message.indices, np.int32))
    return TaskOutput(values.reshape(int(offsets[-1]), -1), offsets)
