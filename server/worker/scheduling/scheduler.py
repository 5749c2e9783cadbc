"""Decides which texts run together. Pure: no clock, no threads, no I/O, no torch; the callers have all of those.

Three rules, with their reasons:

* **Late binding.** `next_batch` is called when the encoder is free, and takes what waits at that moment. A batch that
  was closed earlier would miss the texts that arrive meanwhile. Only a *full* batch may be taken ahead (`full`),
  because waiting cannot improve it.
* **Token budget.** Tokens limit a batch, not texts, because the cost of a packed forward depends on its tokens. A text
  that is longer than the budget is a batch of its own, when its request is the least recently served.
* **Fair share.** Each batch is shared equally between the waiting requests; what small requests do not use goes to the
  larger ones. So a request of a thousand texts delays a request of one text by at most the batch that is running, and
  is itself never starved. Texts are indivisible, so equal shares leave a rest. It goes to the requests that are
  furthest behind the share that they should have had since they arrived. Where more than `EXACT_REQUESTS` requests
  wait, each gets one text, least recently served first.

A batch is of one model. Models share the device's time equally: the next one is the one that has had least of it.
Interactive requests of any model go before bulk requests of any model. Bulk requests share what the interactive
requests of their model leave. In every eighth batch a bulk request goes first, so that bulk work progresses under any
load. A batch is charged what it is expected to take when it is formed, and `settle` corrects that.

Forming a batch costs time in proportion to the batch, not to the queue: no step scans the whole queue. The encoder may
be waiting, so work is done in `add` where possible: most requests have one text, and their slice is made there.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable
from itertools import count, pairwise

from embert.server.worker.scheduling.builder import BatchBuilder, front, share
from embert.server.worker.scheduling.queues import BatchLimits, Lane, ModelQueue
from embert.server.worker.scheduling.requests import Batch, Charge, Request, Slice

__all__ = ["Scheduler"]

BULK_TURN = 8  # one batch in so many serves a bulk request first
SETTLED_MAX = 8.0  # times the expected time: a model does not pay for a machine that slept


class Scheduler:
    """Requests in, batches out. Each text is in one batch, in the order of its request, unless cancelled or expired."""

    def __init__(self) -> None:
        self._models: dict[Hashable, ModelQueue] = {}
        self._batches_before_bulk = 0  # in a row, while bulk requests waited
        self._served_s = [0.0, 0.0]  # `served_s` of the last interactive and of the last bulk lane, before its turn
        self._requests = 0
        self._deadlines: list[tuple[float, int, Hashable]] = []  # a heap; finished requests stay in it for a while
        self._numbers = count()  # so that the heap never compares keys
        self.queue_tokens = 0
        self.queue_texts = 0

    def add_model(self, model: Hashable, limits: BatchLimits) -> None:
        """Take requests of a model from now on."""
        self._models[model] = ModelQueue(model, limits)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises ValueError for a known key, a model that is not here, a text of no tokens, or one longer than is taken.
        """
        if self._found(request.key) is not None:
            raise ValueError(f"request {request.key!r} is queued already")
        queue = self._models.get(request.model)
        if queue is None:
            raise ValueError(f"model {request.model!r} is not loaded here")
        offsets, longest = request.offsets, queue.limits.longest_text
        for start, stop in pairwise(offsets):
            if not 1 <= stop - start <= longest:
                raise ValueError(f"a text of {stop - start} tokens cannot be in a batch of 1 to {longest}")
        if not request.texts:
            return
        lane = queue.lanes[request.bulk]
        if not lane.requests:  # an idle model does not accumulate credit
            lane.served_s = max(lane.served_s, self._served_s[request.bulk])
        request.joined = lane.level
        lane.requests[request.key] = request.piece(0, 1)
        lane.tokens += request.waiting_tokens
        lane.texts += request.waiting_texts
        self.queue_tokens += request.waiting_tokens
        self.queue_texts += request.waiting_texts
        queue.sizes[request.bulk].count(request.waiting_tokens, 1)
        self._requests += 1
        self._note_deadline(request)

    def cancel(self, key: Hashable) -> int:
        """Drop the waiting texts of a request; returns their number, 0 for an unknown key."""
        found = self._found(key)
        return self._drop(*found, key) if found is not None else 0

    def waiting(self) -> list[Hashable]:
        """Keys of the requests with texts still waiting; of one lane and model, the least recently served first."""
        return [key for queue in self._models.values() for lane in queue.lanes for key in lane.requests]

    def expire(self, now: float) -> list[Request]:
        """Remove and return the requests whose deadline has passed."""
        late = []
        while self._deadlines and self._deadlines[0][0] < now:
            deadline, _, key = heapq.heappop(self._deadlines)
            found = self._found(key)
            if found is None:
                continue
            request = found[1].requests[key].request
            if request.deadline == deadline:
                late.append(request)
                self._drop(*found, key)
        return late

    def ahead(self, model: Hashable, tokens: int, *, bulk: bool) -> int:
        """Tokens of the model's other requests that run before a new one of `tokens` is done, if nothing else arrives.

        Until then, each of the others runs as many tokens as the new one, or all that it has. The result is at least
        the sum of these, and at most twice the sum.
        """
        sizes = self._models[model].sizes
        mine = sizes[bulk].up_to(tokens)
        return mine + sizes[False].tokens if bulk else mine

    def tokens_of(self, model: Hashable, *, bulk: bool) -> int:
        """Tokens of a model that wait; without `bulk` those of its interactive requests alone."""
        queue = self._models[model]
        return queue.tokens if bulk else queue.lanes[False].tokens

    def texts_of(self, model: Hashable) -> int:
        """Texts of a model that wait."""
        return self._models[model].texts

    def full(self) -> bool:
        """True when waiting can no longer improve the next batch."""
        queue, _ = self._next_turn()
        return queue is not None and queue.full

    def turn(self) -> tuple[Hashable, bool] | None:
        """The model of the next batch, and whether a bulk request goes first in it; None for an empty queue."""
        queue, bulk_first = self._next_turn()
        return None if queue is None else (queue.name, bulk_first)

    def next_batch(self) -> Batch | None:
        """Form a batch from what waits now; None for an empty queue."""
        queue, bulk_first = self._next_turn()
        if queue is None:
            return None
        first = queue.lanes[bulk_first or not queue.lanes[False].requests]
        budget = max(queue.limits.tokens, next(iter(first.requests.values())).tokens)
        builder = BatchBuilder(budget, queue.limits.texts)
        if queue.fits:
            for lane in queue.lanes:
                builder.take_all(lane)
        else:
            if bulk_first:
                builder.take(front(queue.lanes[True]), budget, texts=1)
            for lane in queue.lanes:
                share(builder, lane)
        slices: list[Slice] = []
        for lane, tokens, texts in zip(queue.lanes, builder.tokens, builder.texts, strict=True):
            if texts:
                of_lane = builder.slices(lane)
                lane.level += tokens / len(lane.requests)
                self._take_out(queue, lane, of_lane)
                slices += of_lane
                lane.tokens -= tokens
                lane.texts -= texts
                self.queue_tokens -= tokens
                self.queue_texts -= texts
        charge = self._charge(queue, builder.tokens, bulk_first=bulk_first)
        return Batch(queue.name, slices, sum(builder.tokens), sum(builder.texts), charge)

    def settle(self, batch: Batch, seconds: float) -> None:
        """Correct what a batch was charged by what it took: once, when it has run."""
        charge = batch.charged
        if charge is None:
            return
        batch.charged = None
        surplus_s = min(seconds, SETTLED_MAX * charge.seconds) - charge.seconds
        interactive, bulk = self._models[batch.model].lanes
        interactive.served_s += surplus_s * charge.interactive
        bulk.served_s += surplus_s * (1 - charge.interactive)

    def _next_turn(self) -> tuple[ModelQueue | None, bool]:
        """The model of the next batch, and whether a bulk request goes first in it."""
        waiting = [[queue for queue in self._models.values() if queue.lanes[bulk].requests] for bulk in (False, True)]
        bulk = bool(waiting[True]) and (not waiting[False] or self._batches_before_bulk >= BULK_TURN - 1)
        return min(waiting[bulk], key=lambda queue: queue.lanes[bulk].served_s, default=None), bulk

    def _take_out(self, queue: ModelQueue, lane: Lane, slices: list[Slice]) -> None:
        """Remove the texts of a batch from their lane."""
        requests, sizes = lane.requests, queue.sizes[lane.bulk]
        done: defaultdict[int, int] = defaultdict(int)  # number of finished requests, by the tokens they had left
        for piece in slices:
            request, stop = piece.request, piece.stop
            offsets = request.offsets
            request.taken = stop
            if stop == len(offsets) - 1:
                del requests[request.key]
                done[piece.tokens] += 1
            else:
                left = offsets[-1] - offsets[stop]
                sizes.count(left + piece.tokens, -1)
                sizes.count(left, 1)
                requests[request.key] = Slice(request, stop, stop + 1, offsets[stop + 1] - offsets[stop])
                requests.move_to_end(request.key)
        for tokens, times in done.items():
            sizes.count(tokens, -times)
            self._requests -= times

    def _charge(self, queue: ModelQueue, tokens: list[int], *, bulk_first: bool) -> Charge:
        """Charge a batch to its lanes: bulk that runs in an interactive turn takes of that turn's time."""
        whole = sum(tokens)
        charge = Charge(queue.limits.cost_s(whole), tokens[False] / whole if bulk_first else 1.0)
        interactive, bulk = queue.lanes
        self._served_s[bulk_first] = queue.lanes[bulk_first].served_s
        interactive.served_s += charge.seconds * charge.interactive
        bulk.served_s += charge.seconds * (1 - charge.interactive)
        bulk_waits = any(each.lanes[True].requests for each in self._models.values())
        self._batches_before_bulk = self._batches_before_bulk + 1 if bulk_waits and not bulk_first else 0
        return charge

    def _found(self, key: Hashable) -> tuple[ModelQueue, Lane] | None:
        """Where a request waits."""
        for queue in self._models.values():
            for lane in queue.lanes:
                if key in lane.requests:
                    return queue, lane
        return None

    def _drop(self, queue: ModelQueue, lane: Lane, key: Hashable) -> int:
        request = lane.requests.pop(key).request
        tokens, texts = request.waiting_tokens, request.waiting_texts
        lane.tokens -= tokens
        lane.texts -= texts
        self.queue_tokens -= tokens
        self.queue_texts -= texts
        queue.sizes[lane.bulk].count(tokens, -1)
        self._requests -= 1
        request.taken = request.texts
        return texts

    def _note_deadline(self, request: Request) -> None:
        if request.deadline == float("inf"):
            return
        heapq.heappush(self._deadlines, (request.deadline, next(self._numbers), request.key))
        # Finished requests stay in the heap, because finding one would cost a search. The heap is rebuilt when most of
        # it is finished, which costs next to nothing per request.
        if len(self._deadlines) > 4 * self._requests + 1024:
            lanes = [lane for queue in self._models.values() for lane in queue.lanes]
            requests = [piece.request for lane in lanes for piece in lane.requests.values()]
            left = [each for each in requests if each.deadline < float("inf")]
            self._deadlines = [(each.deadline, next(self._numbers), each.key) for each in left]
            heapq.heapify(self._deadlines)
