"""Decides which texts run together. Pure: no clock, no threads, no I/O, no torch; the callers have all of those.

Three rules and their reasons:

* **Late binding.** `next_batch` is called when the encoder is free or about to be (loop.py), and takes what waits at
  that moment. A batch that was closed earlier would miss the texts that arrive later. Only a *full* batch may be taken
  earlier (`full`), because waiting cannot improve it.
* **Token budget.** Tokens limit a batch, not texts, because the cost of a packed forward depends on its tokens. A long
  text counts as more than it has (lanes.py). If it counts as more than the budget, it is a separate batch.
* **Fair share over time.** Equal parts of every batch would cut requests into slices of a text or two, and what follows
  a batch costs per slice. So large requests share by deficit round robin: each takes a quantum, a quarter of a batch,
  in its round. Small requests go first, in half of a batch. So a small request waits for the batch that is running, and
  for other small ones; a large request waits for its round, and the end of a batch interrupts its quantum once at most.

A batch has one model. Models share the device's time equally: the model with the least device time is next.
Interactive requests of any model go before low-priority requests of any model. Low-priority requests fill the capacity
that the interactive requests of their model leave while that keeps the batch short; otherwise they run in the next
batch. In every eighth batch a quantum of low-priority requests goes first, so that they progress under any load.
While interactive requests come, low-priority batches are short, because the next interactive request waits for them.
A batch is charged its expected time when it is formed, and `settle` corrects that.

Forming a batch costs time in proportion to the batch, not to the queue: no step scans the whole queue. The encoder may
be waiting, so work is done in `add` where possible: the slice of a small request is made there.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import count

from embert.engine.models.flops import PLAIN_TOKENS
from embert.server.engine_worker.lanes import BatchBuilder, BatchLimits, Lane, ModelQueue, Request, Slice

_NEVER = float("inf")  # a deadline
LOW_PRIORITY_INTERVAL = 8  # every eighth batch serves a low-priority request first
SETTLED_MAX = 8.0  # times the expected time: a suspended machine must not count as device time

# Low-priority requests may make an interactive batch this much longer: a share of its time, or seconds.
FILL_SHARE, FILL_S = 0.25, 0.005
# While interactive requests come, a batch of only low-priority requests takes SHORT_S, or SHORT_FIXED times its fixed
# time: shorter ones would cost throughput.
SHORT_S, SHORT_FIXED = 0.04, 5.0
INTERACTIVE_DEVICE_S = 10.0  # device time of batches after an interactive request, in which another one is expected


@dataclass(slots=True)
class Charge:
    """The expected device time of a batch, charged to its model when the batch is formed."""

    seconds: float
    interactive: float  # share charged to the interactive lane; the low-priority lane is charged the rest


@dataclass(slots=True, eq=False)
class Batch:
    """The texts of one forward, at least one."""

    model: Hashable
    slices: list[Slice]
    tokens: int
    counted: int  # counted tokens
    texts: int
    charge: Charge | None = None  # None: made of parts of another batch


class Scheduler:
    """Requests in, batches out. Each text is in one batch, in the order of its request, unless cancelled or expired."""

    def __init__(self) -> None:
        self._models: dict[Hashable, ModelQueue] = {}
        self._batches_before_low_priority = 0  # in a row, while low-priority requests waited
        self._served_s = [0.0, 0.0]  # of the last lane of each priority, before its batch
        self._since_interactive_s = INTERACTIVE_DEVICE_S  # device time of batches since an interactive request came
        self._deadlines: list[tuple[float, int, Hashable]] = []  # a heap; finished requests stay in it for a while
        self._deadlines_max = 1024
        self._numbers = count()  # so that the heap never compares keys
        self.queue_tokens = 0
        self.queue_texts = 0

    def add_model(self, model: Hashable, limits: BatchLimits) -> None:
        """Accept requests for a model from now on."""
        self._models[model] = ModelQueue(model, limits)

    def add(self, request: Request) -> None:
        """Queue a request, whose key is unique. Raises ValueError for a text that is empty or too long."""
        key, texts, tokens = request.key, request.texts, request.tokens
        queue = self._models[request.model]
        limits = queue.limits
        shortest, longest = (tokens, tokens) if texts == 1 else (min(request.lengths), max(request.lengths))
        if shortest < 1 or longest > limits.longest_text:
            wrong = shortest if shortest < 1 else longest
            raise ValueError(f"a text of {wrong} tokens cannot be in a batch of 1 to {limits.longest_text}")
        lane = queue.lanes[request.low_priority]
        if not lane.texts:  # an idle model does not accumulate credit
            lane.served_s = max(lane.served_s, self._served_s[request.low_priority])
        if not request.low_priority:
            self._since_interactive_s = 0.0
        if tokens <= limits.small_tokens and longest <= PLAIN_TOKENS:
            lane.small[key] = Slice(request, 0, texts, tokens)
        else:
            (lane.long if limits.count(request, longest) else lane.large)[key] = request
            tokens = request.tokens
            lane.sizes.count(tokens, 1)
        lane.tokens += tokens
        lane.texts += texts
        self.queue_tokens += tokens
        self.queue_texts += texts
        if request.deadline < _NEVER:
            heapq.heappush(self._deadlines, (request.deadline, next(self._numbers), key))
            if len(self._deadlines) > self._deadlines_max:
                self._forget_finished()

    def cancel(self, key: Hashable) -> int:
        """Drop the waiting texts of a request. Returns their number, 0 for an unknown key."""
        waiting = self._find(key)
        return self._drop(*waiting) if waiting is not None else 0

    def waiting(self) -> list[Request]:
        lanes = [lane for queue in self._models.values() for lane in queue.lanes]
        small = [piece.request for lane in lanes for piece in lane.small.values()]
        return small + [request for lane in lanes for each in (lane.large, lane.long) for request in each.values()]

    def expire(self, now: float) -> list[Request]:
        late = []
        while self._deadlines and self._deadlines[0][0] < now:
            deadline, _, key = heapq.heappop(self._deadlines)
            waiting = self._find(key)
            if waiting is not None and waiting[1].deadline == deadline:
                late.append(waiting[1])
                self._drop(*waiting)
        return late

    def ahead(self, model: Hashable, tokens: int, *, low_priority: bool) -> int:
        """Tokens of the model's other requests that run before a new one of `tokens` is done, if nothing else arrives.

        Small requests run before. Until a large one is done, each of the other large ones runs as many tokens, or all
        its tokens. The result is at least the sum of these, and at most twice the sum.
        """
        queue = self._models[model]
        lane = queue.lanes[low_priority]
        before = lane.tokens - lane.sizes.tokens
        if tokens > queue.limits.small_tokens:
            before += lane.sizes.up_to(tokens)
        return before + queue.lanes[False].tokens if low_priority else before

    def tokens_of(self, model: Hashable, *, low_priority: bool) -> int:
        """Waiting tokens of a model; without `low_priority`, only those of its interactive requests."""
        queue = self._models[model]
        return queue.tokens if low_priority else queue.lanes[False].tokens

    def texts_of(self, model: Hashable) -> int:
        return self._models[model].texts

    def full(self) -> bool:
        """True when waiting can no longer improve the next batch. A shorter text would go before a long request's."""
        queue, low_priority_first = self._next()
        if queue is None or not queue.full:
            return False
        lane = queue.lanes[low_priority_first]
        return not (lane.long and lane.long_is_next)

    def next_queue(self) -> tuple[Hashable, bool] | None:
        """The model of the next batch, and True if a low-priority request goes first in it; None for an empty queue."""
        queue, low_priority_first = self._next()
        return None if queue is None else (queue.name, low_priority_first)

    def next_batch(self) -> Batch | None:
        """Form a batch from what waits now; None for an empty queue."""
        queue, low_priority_first = self._next()
        if queue is None:
            return None
        limits, (interactive, low_priority) = queue.limits, queue.lanes
        budget = limits.tokens if interactive.texts else self._low_priority_tokens(limits)
        builder = BatchBuilder(limits, max(budget, (low_priority if low_priority_first else interactive).least_tokens))
        if low_priority_first and interactive.texts:
            quantum = min(self._low_priority_tokens(limits), limits.quantum_tokens)
            builder.fill(low_priority, max(quantum, low_priority.least_tokens))
        if interactive.texts:
            builder.fill(interactive, builder.tokens_left)
            if low_priority.texts and not self._fill_rest(builder, low_priority) and not low_priority_first:
                self._batches_before_low_priority = LOW_PRIORITY_INTERVAL  # low priority leads the next batch instead
        else:
            builder.fill(low_priority, builder.tokens_left)
        tokens, texts = sum(builder.tokens), builder.texts
        self.queue_tokens -= builder.waited
        self.queue_texts -= texts
        charge = self._charge(queue, builder.tokens, low_priority_first=low_priority_first)
        return Batch(queue.name, builder.slices(), tokens - builder.surplus, tokens, texts, charge)

    def settle(self, batch: Batch, seconds: float) -> None:
        """Replace the charge of a batch by its measured device time, once."""
        charge = batch.charge
        if charge is None:
            return
        batch.charge = None
        surplus_s = min(seconds, SETTLED_MAX * charge.seconds) - charge.seconds
        interactive, low_priority = self._models[batch.model].lanes
        interactive.served_s += surplus_s * charge.interactive
        low_priority.served_s += surplus_s * (1 - charge.interactive)

    def _next(self) -> tuple[ModelQueue | None, bool]:
        """The model of the next batch, and True if a low-priority request goes first in it."""
        models = self._models.values()
        waiting = [[queue for queue in models if queue.lanes[low].texts] for low in (False, True)]
        is_due = self._batches_before_low_priority >= LOW_PRIORITY_INTERVAL - 1
        low_priority = bool(waiting[True]) and (not waiting[False] or is_due)
        return min(
            waiting[low_priority], key=lambda queue: queue.lanes[low_priority].served_s, default=None
        ), low_priority

    def _low_priority_tokens(self, limits: BatchLimits) -> int:
        """Tokens of a batch of only low-priority requests: short while interactive requests come."""
        if self._since_interactive_s >= INTERACTIVE_DEVICE_S:
            return limits.tokens
        short_s = max(SHORT_S, SHORT_FIXED * limits.cost.fixed_s)
        return min(limits.tokens, limits.cost.tokens_within(short_s))

    def _fill_rest(self, builder: BatchBuilder, low_priority: Lane) -> bool:
        """Fill an interactive batch with low-priority requests, if it stays short and they get enough tokens.

        Returns False if half of the batch or more stays empty because filling it would take too long.
        """
        limits, taken = builder.limits, sum(builder.tokens)
        own_s = limits.cost.seconds(taken)
        most = limits.cost.tokens_within(own_s + max(FILL_SHARE * own_s, FILL_S))
        tokens = min(builder.tokens_left, most - taken)
        if tokens >= min(low_priority.tokens, max(1, limits.quantum_tokens // 2)):
            builder.fill(low_priority, tokens)
            return True
        return 2 * builder.tokens_left < limits.tokens

    def _charge(self, queue: ModelQueue, tokens: list[int], *, low_priority_first: bool) -> Charge:
        """Charge a batch to its lanes. Low-priority requests in an interactive batch are not charged."""
        whole = sum(tokens)
        charge = Charge(queue.limits.cost.seconds(whole), tokens[False] / whole if low_priority_first else 1.0)
        interactive, low_priority = queue.lanes
        self._served_s[low_priority_first] = queue.lanes[low_priority_first].served_s
        interactive.served_s += charge.seconds * charge.interactive
        low_priority.served_s += charge.seconds * (1 - charge.interactive)
        self._since_interactive_s += charge.seconds
        low_priority_waits = any(other.lanes[True].texts for other in self._models.values())
        if low_priority_waits and not low_priority_first:
            self._batches_before_low_priority += 1
        else:
            self._batches_before_low_priority = 0
        return charge

    def _find(self, key: Hashable) -> tuple[Lane, Request] | None:
        for queue in self._models.values():
            for lane in queue.lanes:
                for requests in (lane.large, lane.long):
                    if key in requests:
                        return lane, requests[key]
                if key in lane.small:
                    return lane, lane.small[key].request
        return None

    def _drop(self, lane: Lane, request: Request) -> int:
        tokens, texts = request.waiting_tokens, request.waiting_texts
        if lane.small.pop(request.key, None) is None:
            del (lane.large if request.key in lane.large else lane.long)[request.key]
            lane.sizes.count(tokens, -1)
        lane.tokens -= tokens
        lane.texts -= texts
        self.queue_tokens -= tokens
        self.queue_texts -= texts
        request.start = request.texts
        return texts

    def _forget_finished(self) -> None:
        """Rebuild the heap of deadlines, most of whose requests have finished.

        Removing each one when it finishes would cost a search.
        """
        waiting = [request for request in self.waiting() if request.deadline < _NEVER]
        self._deadlines = [(request.deadline, next(self._numbers), request.key) for request in waiting]
        heapq.heapify(self._deadlines)
        self._deadlines_max = 4 * len(waiting) + 1024
