"""What may enter the queue of all engines, and the 429 and 503 for what may not.

A request is admitted while all API processes together have fewer unanswered tokens than the limit
(server/ipc/shared_counters.py), or none at all. The limit is the token budget, or fewer tokens where the engines would
take longer for it than `--max-queue-seconds`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from embert.server.api.input.request_options import RequestOptions
from embert.server.config import ServeConfig
from embert.server.http.errors import Overloaded, Unavailable
from embert.server.ipc.control import EngineState
from embert.server.ipc.messages import EngineStatus
from embert.server.ipc.shared_counters import SharedCounters

__all__ = ["Admission"]

BULK_SHARE = 0.75  # of the limit: bulk requests leave room for interactive ones
MIN_BATCHES = 2  # of each engine that the limit always holds; with fewer an engine would wait between two batches
_RETRY_AFTER_MAX_S = 60


class Engine(Protocol):
    """What admission must know of an engine."""

    @property
    def ready(self) -> bool:
        """Whether it can work."""
        ...

    @property
    def state(self) -> EngineState:
        """What the supervisor says of it."""
        ...

    @property
    def status(self) -> EngineStatus | None:
        """What it said last of itself; None before it has said anything."""
        ...


class Admission:
    """Counts what this API process has admitted, and decides what else may enter."""

    def __init__(
        self, config: ServeConfig, counters: SharedCounters, worker: int, engines: Mapping[int, Engine]
    ) -> None:
        """`worker` is this process's place among the counters; `engines`, by index, are the router's."""
        self.draining = False
        self.max_queue_tokens = config.max_queue_tokens or 0  # of the whole server; 0 until an engine tells its batch
        self.admitted_tokens = 0  # by this process, and not yet answered
        self._config = config
        self._counters, self._worker = counters, worker
        self._engines = engines

    # --- readiness ---

    @property
    def ready(self) -> bool:
        """Whether any engine can work."""
        return any(engine.ready for engine in self._engines.values())

    def unready_reason(self) -> str:
        """Why requests cannot be taken, as a sentence for clients."""
        if self.draining:
            return "the server is shutting down"
        states = (self._engines[index].state for index in sorted(self._engines))
        details = [
            "connecting"
            if state.state == "ready"
            else f"{state.state}: {state.detail}"
            if state.detail
            else state.state
            for state in states
        ]
        return f"the engine is not ready ({'; '.join(details) or 'starting'})"

    def check_ready(self) -> None:
        """Raise Unavailable when no request can be taken now."""
        if self.draining:
            raise Unavailable(self.unready_reason(), retry_after_s=1, reason="draining")
        if not self.ready:
            raise Unavailable(self.unready_reason(), retry_after_s=2, reason="loading")

    # --- limits ---

    def size_queue(self, max_batch_tokens: int) -> None:
        """Resolve the token budget's default, once an engine has told the tokens of its batch."""
        if not self.max_queue_tokens:
            # For all engines, even where this process hears of them one by one, as after its restart.
            engines = len(self._counters.engine_alive)
            self.max_queue_tokens = self._config.queue_budget(max_batch_tokens, engines)

    @property
    def tokens_per_s(self) -> float:
        """The rate at which the ready engines work a queue off; 0 while it is not known."""
        return sum(engine.status.tokens_per_s for engine in self._engines.values() if engine.ready and engine.status)

    @property
    def queue_limit(self) -> int:
        """Tokens that may now be admitted and not yet answered; 0 until an engine tells its batch."""
        by_time = self.tokens_per_s * self._config.max_queue_seconds
        if not by_time or by_time >= self.max_queue_tokens:
            return self.max_queue_tokens
        infos = [engine.state.info for engine in self._engines.values() if engine.ready]
        least = MIN_BATCHES * sum(info.max_batch_tokens for info in infos if info is not None)
        return min(self.max_queue_tokens, max(int(by_time), least))

    def _limit(self, options: RequestOptions) -> int:
        return int(BULK_SHARE * self.queue_limit) if options.bulk else self.queue_limit

    # --- one request ---

    def check_time(self, options: RequestOptions) -> None:
        """Raise Unavailable once the deadline has passed."""
        if time.monotonic() > options.deadline:
            raise self.too_late(options)

    def check_room(self, least: Callable[[], int], most: int, options: RequestOptions) -> None:
        """Raise Overloaded for what cannot be admitted, before it is tokenised.

        `most` is a cheap upper bound of the request's tokens. `least` counts a lower bound; it runs only where `most`
        does not fit.
        """
        admitted, limit = self._counters.admitted, self._limit(options)
        # `check` tells of a server that is not ready.
        if not admitted or admitted + most <= limit or self.draining or not self.ready:
            return
        tokens = least()
        if admitted + tokens > limit:
            raise self._overloaded(admitted, str(tokens) if tokens == most else f"at least {tokens}", limit)

    def check(self, tokens: int, options: RequestOptions) -> None:
        """Raise Unavailable or Overloaded where a tokenised request cannot enter."""
        self.check_ready()
        admitted = self._counters.admitted
        limit = self._limit(options)
        if admitted and admitted + tokens > limit:
            raise self._overloaded(admitted, str(tokens), limit)
        self.check_time(options)  # tokenising may have taken that long

    def add(self, tokens: int) -> None:
        """Count tokens that enter, or with a negative number, tokens that are answered."""
        self.admitted_tokens += tokens
        self._counters.admitted_tokens[self._worker] = self.admitted_tokens

    # --- errors with numbers in them ---

    def too_late(self, options: RequestOptions, why: str = "") -> Unavailable:
        """The answer to a request that is out of time; `why` it cannot be met where the time is not over yet."""
        could = f"cannot be answered in time, {why}: it has" if why else "was not answered within"
        message = f"the request {could} {options.timeout_s:g} s ({options.set_by})"
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
