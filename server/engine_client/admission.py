"""Admits requests to the queue of a model, and refuses the others with 429 and 503.

A request is admitted while all HTTP processes together have fewer unfinished tokens of its model than the limit
(server/ipc/shared_counters.py). Long texts count as more tokens than they have (engine/models/flops.py). The limit is
the token budget, or fewer tokens where the engines would take longer for them than `--max-queue-seconds`. Each model
has a separate budget, so no flood of one model's requests refuses those of another; the work of other models counts
as their share of the engines' time.

A request counts as an eighth of the limit at most. While it waits, the engine gives others no more time than it takes
itself (fair share), so a larger queue of others adds no delay. So a large request need not find an empty queue, and
does not fill it: a request of up to an eighth of the limit waits for at most the limit, and a larger one takes at most
eight times as long as its own work. Large ones leave an eighth of the limit to smaller ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from embert.engine.models.flops import PLAIN_TOKENS, TokenCounts
from embert.engine.tokenization.encoded import Encoded
from embert.server.config import ServeConfig
from embert.server.engine_client.connection import EngineConnection
from embert.server.http.errors import Overloaded, Unavailable
from embert.server.http.request_head import TIMEOUT_HEADER, RequestOptions
from embert.server.ipc.control import EngineState
from embert.server.ipc.shared_counters import SharedCounters
from embert.server.observability.request_record import EXPIRED

LOW_PRIORITY_SHARE = 0.75  # of the limit: low-priority requests leave the rest to interactive ones
LARGE_PART = 8  # of the limit divided by this: what a request counts as at most, and what larger ones leave free
MIN_BATCHES = 2  # of each engine that the limit always holds; with fewer an engine would wait between two batches


class Admission:
    """Counts the tokens of one model that this HTTP process has admitted, and admits more within the limit."""

    def __init__(
        self,
        config: ServeConfig,
        counters: SharedCounters,
        http_index: int,
        engines: Mapping[int, EngineConnection],
        model: int = 0,
        name: str = "",
    ) -> None:
        """`config` is the model's, `model` its number, `name` its name in errors, empty if it is the only model.

        `http_index` is this process's index in the counters; `engines`, by index, are the router's.
        """
        self.draining = False
        self.max_queue_tokens = config.max_queue_tokens or 0  # 0 until an engine reports its batch size
        self.admitted_tokens = 0  # by this process, and not finished
        self.was_ready = False
        self.counts: TokenCounts | None = None  # queue cost of its texts; None: their number of tokens
        self._config, self._model, self._name = config, model, name
        self._counters, self._http_index = counters, http_index
        self._engines = engines
        self._least_limit = 0  # tokens of MIN_BATCHES batches of each engine where the model is ready
        self._batch_tokens: dict[int, int] = {}  # by index of the engines that have the model; 0: not reported yet

    # --- readiness ---

    @property
    def ready(self) -> bool:
        for engine in self._engines.values():  # noqa: SIM110 - for every request; a generator takes three times as long
            if self._model in engine.running:
                return True
        return False

    @property
    def failed(self) -> bool:
        """True if no engine serves the model or is loading it."""
        models = [state.models.get(self._model) for state in self._states]
        return bool(models) and all(model is not None and model.state == "failed" for model in models)

    @property
    def _states(self) -> list[EngineState]:
        """States of the engines that have the model, or may have it: an engine that is down reports no models."""
        states = (self._engines[index].state for index in sorted(self._engines))
        return [state for state in states if self._model in state.models or not state.models]

    def unready_reason(self) -> str:
        """Reason why requests cannot be taken, as a sentence for clients."""
        if self.draining:
            return "the server is shutting down"
        details = "; ".join(map(self._condition, self._states)) or "starting"
        if self.failed:
            return f"{self._name or 'the model'} has failed ({details})"
        return f"{self._name} is not ready ({details})" if self._name else f"the engine is not ready ({details})"

    def _condition(self, state: EngineState) -> str:
        model = state.models.get(self._model)
        if model is None or (state.state == "down" and model.state != "failed"):
            return f"{state.state}: {state.detail}" if state.detail else state.state
        if model.state == "ready":
            return "connecting"
        detail = model.detail or state.detail
        if detail.startswith(model.state):  # "loading the weights"
            return detail
        return f"{model.state}: {detail}" if detail else model.state

    def check_ready(self) -> None:
        """Raise Unavailable when no request can be taken now."""
        if self.draining:
            raise Unavailable(self.unready_reason(), retry_after_s=1, reject_reason="draining")
        if not self.ready:
            raise self.unready()

    def unready(self) -> Unavailable:
        """The error while the model is not ready. A failed model has no early retry."""
        return Unavailable(self.unready_reason(), retry_after_s=None if self.failed else 2)

    # --- limits ---

    def note(self, state: EngineState) -> None:
        """Store an engine's state. The default budget is the sum over the engines that have the model."""
        running = [engine.state for engine in self._engines.values() if self._model in engine.running]
        infos = [other.models[self._model].info for other in running]
        self._least_limit = MIN_BATCHES * sum(info.max_batch_tokens for info in infos if info is not None)
        model = state.models.get(self._model)
        if model is None:
            return
        self.was_ready = self.was_ready or model.state == "ready"
        if model.state == "failed":
            self._batch_tokens.pop(state.index, None)
        else:
            known = self._batch_tokens.get(state.index, 0)
            self._batch_tokens[state.index] = model.info.max_batch_tokens if model.info is not None else known
        first_known = next(filter(None, self._batch_tokens.values()), 0)
        together = sum(tokens or first_known for tokens in self._batch_tokens.values())
        self.max_queue_tokens = self._config.queue_budget(together, 1)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of the ready engines for a queue of the model; 0 while unknown."""
        return self._rate(self._model)

    def _rate(self, model: int) -> float:
        rate = 0.0
        for engine in self._engines.values():
            if engine.status is not None and model in engine.running:
                rate += engine.status.tokens_per_s[model]
        return rate

    def _others_s(self) -> list[float]:
        """The work of each model that shares an engine with this one, in seconds, if its rate is known."""
        sharing: set[int] = set()
        for engine in self._engines.values():
            if self._model in engine.running:
                sharing |= engine.running
        works = []
        for model in sharing - {self._model}:
            tokens = self._counters.admitted(model)
            if tokens and (rate := self._rate(model)):
                works.append(tokens / rate)
        return works

    @property
    def queue_limit(self) -> int:
        """Largest number of unfinished tokens of the model; 0 until an engine reports its batch size."""
        rate, limit_s = self.tokens_per_s, self._config.max_queue_seconds
        by_time = rate * limit_s
        # If its share of the time allows the whole budget, the work of other models does not matter.
        if not by_time or by_time / len(self._counters.admitted_tokens) >= self.max_queue_tokens:
            return self.max_queue_tokens
        if len(self._counters.admitted_tokens) > 1 and (others_s := self._others_s()):
            by_time = rate * work_within(limit_s, others_s)
        return min(self.max_queue_tokens, max(int(by_time), self._least_limit))

    def _cost(self, tokens: int, admitted: int, options: RequestOptions) -> int:
        """Returns the queue cost of a request with `tokens` tokens, or 0 if it cannot fit."""
        limit = self.queue_limit
        most = max(1, limit // LARGE_PART)
        cost = min(tokens, most)
        if options.low_priority:
            limit = int(LOW_PRIORITY_SHARE * limit)
        if tokens > most:
            limit -= most
        return cost if admitted + cost <= limit or not admitted else 0

    # --- one request ---

    def tokens_of(self, encoded: Encoded, prefix: int = 0) -> int:
        """Queue cost of all texts of a request, which have `prefix` first tokens in common."""
        repeats = encoded.sequences - 1
        if self.counts is None or encoded.lengths.max() <= PLAIN_TOKENS:
            return encoded.tokens - prefix * repeats
        shared, *counts = self.counts.of([prefix, *encoded.lengths.tolist()])
        return sum(counts) - shared * repeats

    def check_time(self, options: RequestOptions) -> None:
        """Raise Unavailable once the deadline has passed."""
        if time.monotonic() > options.deadline:
            raise self.too_late(options)

    def check_capacity(self, least: Callable[[], int], most: int, options: RequestOptions) -> None:
        """Raise Overloaded for a request that cannot be admitted, before it is tokenized.

        `most` is a cheap upper bound of the request's tokens. `least` counts a lower bound; it runs only if `most` does
        not fit.
        """
        admitted = self._counters.admitted(self._model)
        # `check` reports a server that is not ready.
        if self._cost(most, admitted, options) or self.draining or not self.ready:
            return
        tokens = least()
        if not self._cost(tokens, admitted, options):
            raise self._overloaded(admitted, tokens, options, exact=tokens == most)

    def check(self, tokens: int, options: RequestOptions) -> int:
        """Returns the queue cost of a tokenized request. Raises Unavailable or Overloaded if it cannot enter."""
        self.check_ready()
        admitted = self._counters.admitted(self._model)
        cost = self._cost(tokens, admitted, options)
        if not cost:
            raise self._overloaded(admitted, tokens, options)
        self.check_time(options)  # tokenizing may have taken that long
        return cost

    def add(self, tokens: int) -> None:
        """Count tokens that enter, or with a negative number, tokens that leave."""
        self.admitted_tokens += tokens
        self._counters.admitted_tokens[self._model][self._http_index] = self.admitted_tokens

    # --- errors with numbers in them ---

    def too_late(self, options: RequestOptions, why: str = "") -> Unavailable:
        """The error for a request past its deadline; `why`: the reason if the deadline cannot be met."""
        could = f"cannot be served in time, {why}: it has" if why else "was not served within"
        message = f"the request {could} {options.timeout_s:g} s ({options.set_by})"
        error = Unavailable(message, retry_after_s=self._retry_after_s(), reject_reason="deadline")
        if options.set_by == TIMEOUT_HEADER:
            error.outcome = EXPIRED
        return error

    def _overloaded(self, admitted: int, tokens: int, options: RequestOptions, *, exact: bool = True) -> Overloaded:
        limit, rate = self.queue_limit, self.tokens_per_s
        most = max(1, limit // LARGE_PART)
        queue = f"the queue of {self._name}" if self._name else "the queue"
        share = f", of which low-priority requests may fill {LOW_PRIORITY_SHARE:.0%}" if options.low_priority else ""
        of_large = f"; a request of over {most} tokens counts as {most} and leaves {most} free" if tokens > most else ""
        by_time = f"--max-queue-seconds {self._config.max_queue_seconds:g} at {rate:.0f} tokens/s"
        if self._others_s():
            by_time += ", shared with other models"
        set_by = by_time if limit < self.max_queue_tokens else "--max-queue-tokens"
        return Overloaded(
            f"{queue} holds {admitted} tokens and this request has {'' if exact else 'at least '}{tokens}; "
            f"the limit is {limit} ({set_by}){share}{of_large}",
            retry_after_s=self._retry_after_s(),
        )

    def _retry_after_s(self) -> int:
        """Whole seconds until the model's queue is empty, at the last rates of the engines."""
        rate = self.tokens_per_s
        if not rate:
            return 1
        left_s = wait_s(self._counters.admitted(self._model) / rate, self._others_s())
        return max(1, math.ceil(left_s))


def wait_s(work_s: float, others_s: Sequence[float]) -> float:
    """Seconds until work of `work_s` seconds is done while other models have work.

    While several models have work, each gets the same share of an engine's time: others take as much time as this work
    does, or as much as they have work for.
    """
    return work_s + sum(min(work_s, other_s) for other_s in others_s)


def work_within(limit_s: float, others_s: Sequence[float]) -> float:
    """The most work, in seconds, that is done within `limit_s` next to that of other models: `wait_s`, inverted."""
    left_s, sharing = limit_s, len(others_s) + 1
    for other_s in sorted(others_s):
        if other_s * sharing >= left_s:
            break
        left_s -= other_s  # all of it is done within the time, and the others share the rest
        sharing -= 1
    return left_s / sharing
