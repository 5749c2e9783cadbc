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

A batch holds texts of one task. Interactive requests of any task go before bulk requests of any task. The next task is
the one that has been served fewest tokens. Bulk requests share what the interactive requests of their task leave. In
every eighth batch a bulk request goes first, so that bulk work progresses under any load.

Forming a batch costs time in proportion to the batch, not to the queue: no step scans the whole queue. The encoder may
be waiting, so work is done in `add` where possible: most requests have one text, and their slice is made there.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate, count, islice, pairwise
from typing import Any

__all__ = ["Batch", "Request", "Scheduler", "Slice"]

BULK_TURN = 8  # one batch in so many serves a bulk request first
EXACT_REQUESTS = 128  # of a lane; up to so many, shares are equal to the token
SMALLEST_TURN = 8  # even the smallest batch takes time: it counts as at least 1/8 of a full one
SKIPPED_TEXTS = 16  # texts too long for the rest of a batch, after which the search for shorter ones ends


@dataclass(slots=True, eq=False)
class Request:
    """All texts of one HTTP request. `payload` belongs to the caller; the scheduler does not read it."""

    key: Hashable
    lengths: Iterable[int]  # tokens of each text, all ≥ 1
    task: Hashable = None  # a batch holds one task
    deadline: float = float("inf")  # on the caller's clock; it must not start later
    bulk: bool = False  # low priority
    payload: Any = None
    offsets: list[int] = field(init=False)  # prefix sums of lengths, [n + 1]
    taken: int = field(default=0, init=False)  # texts already in a batch
    joined: float = field(default=0.0, init=False)  # its lane's `level` when it was added

    def __post_init__(self) -> None:
        self.offsets = list(accumulate(self.lengths, initial=0))

    @property
    def texts(self) -> int:
        """Number of texts."""
        return len(self.offsets) - 1

    @property
    def level(self) -> float:
        """Virtual time of the request: the lower, the further behind its equal share. See `_Lane.level`."""
        return self.joined + self.offsets[self.taken]

    @property
    def waiting_texts(self) -> int:
        """Texts not yet in a batch."""
        return len(self.offsets) - 1 - self.taken

    @property
    def waiting_tokens(self) -> int:
        """Tokens not yet in a batch."""
        return self.offsets[-1] - self.offsets[self.taken]

    def piece(self, start: int, stop: int) -> Slice:
        """The texts `start` … `stop - 1`."""
        return Slice(self, start, stop, self.offsets[stop] - self.offsets[start])


@dataclass(slots=True, eq=False)
class Slice:
    """Consecutive texts `start` … `stop - 1` of one request."""

    request: Request
    start: int
    stop: int
    tokens: int


@dataclass(slots=True, eq=False)
class Batch:
    """The texts of one forward, at least one."""

    task: Hashable
    slices: list[Slice]
    tokens: int
    texts: int


class Scheduler:
    """Requests in, batches out. Each text is in one batch, in the order of its request, unless cancelled or expired."""

    def __init__(
        self, max_batch_tokens: int, max_batch_texts: int | None = None, longest_text: int | None = None
    ) -> None:
        """`longest_text` is the most tokens that a text may have; None: the budget."""
        self._token_budget = max_batch_tokens
        self._longest_text = max(max_batch_tokens, longest_text or 0)
        self._text_budget = max_batch_texts if max_batch_texts is not None else max_batch_tokens
        self._tasks: dict[Hashable, _Task] = {}
        self._batches_before_bulk = 0  # in a row, while bulk requests waited
        self._served = [0, 0]  # `served` of the last interactive and of the last bulk lane, before its turn
        self._sizes = _Sizes(), _Sizes()  # of interactive and of bulk requests
        self._requests = 0
        self._deadlines: list[tuple[float, int, Hashable]] = []  # a heap; finished requests stay in it for a while
        self._numbers = count()  # so that the heap never compares keys
        self.queue_tokens = 0
        self.queue_texts = 0

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError for a known key, a text of no tokens, or one longer than is taken."""
        if self._lane_of(request.key) is not None:
            raise ValueError(f"request {request.key!r} is queued already")
        offsets = request.offsets
        for start, stop in pairwise(offsets):
            if not 1 <= stop - start <= self._longest_text:
                raise ValueError(f"a text of {stop - start} tokens cannot be in a batch of 1 to {self._longest_text}")
        if not request.texts:
            return
        if request.task not in self._tasks:
            self._tasks[request.task] = _Task(request.task)
        lane = self._tasks[request.task].lanes[request.bulk]
        if not lane.requests:  # an idle task does not accumulate credit
            lane.served = max(lane.served, self._served[request.bulk])
        request.joined = lane.level
        lane.requests[request.key] = request.piece(0, 1)
        lane.tokens += request.waiting_tokens
        lane.texts += request.waiting_texts
        self.queue_tokens += request.waiting_tokens
        self.queue_texts += request.waiting_texts
        self._sizes[request.bulk].count(request.waiting_tokens, 1)
        self._requests += 1
        self._note_deadline(request)

    def cancel(self, key: Hashable) -> int:
        """Drop the waiting texts of a request; returns their number, 0 for an unknown key."""
        lane = self._lane_of(key)
        return self._drop(lane, lane.requests[key].request) if lane is not None else 0

    def waiting(self) -> list[Hashable]:
        """Keys of the requests with texts still waiting; of one lane and task, the least recently served first."""
        return [key for task in self._tasks.values() for lane in task.lanes for key in lane.requests]

    def expire(self, now: float) -> list[Request]:
        """Remove and return the requests whose deadline has passed."""
        late = []
        while self._deadlines and self._deadlines[0][0] < now:
            deadline, _, key = heapq.heappop(self._deadlines)
            lane = self._lane_of(key)
            request = lane.requests[key].request if lane is not None else None
            if lane is not None and request is not None and request.deadline == deadline:
                late.append(request)
                self._drop(lane, request)
        return late

    def ahead(self, tokens: int, *, bulk: bool) -> int:
        """Tokens of other requests that run before a new request of `tokens` is done, if nothing else arrives.

        Until then, each of the others runs as many tokens as the new one, or all that it has. The result is at least
        the sum of these, and at most twice the sum.
        """
        mine = self._sizes[bulk].up_to(tokens)
        return mine + self._sizes[False].tokens if bulk else mine

    def full(self) -> bool:
        """True when waiting can no longer improve the next batch."""
        if self.queue_tokens < self._token_budget and self.queue_texts < self._text_budget:
            return False
        task, _ = self._next_turn()
        return task is not None and (task.tokens >= self._token_budget or task.texts >= self._text_budget)

    def next_batch(self) -> Batch | None:
        """Form a batch from what waits now; None for an empty queue."""
        task, bulk_first = self._next_turn()
        if task is None:
            return None
        first = task.lanes[bulk_first or not task.lanes[False].requests]
        budget = max(self._token_budget, next(iter(first.requests.values())).tokens)
        builder = _BatchBuilder(budget, self._text_budget)
        if task.tokens <= self._token_budget and task.texts <= self._text_budget:
            for lane in task.lanes:
                builder.take_all(lane)
        else:
            if bulk_first:
                builder.take(_front(task.lanes[True]), budget, texts=1)
            for lane in task.lanes:
                _share(builder, lane)
        slices: list[Slice] = []
        for lane, tokens, texts in zip(task.lanes, builder.tokens, builder.texts, strict=True):
            if texts:
                of_lane = builder.slices(lane)
                lane.level += tokens / len(lane.requests)
                self._take_out(lane, of_lane)
                slices += of_lane
                lane.tokens -= tokens
                lane.texts -= texts
                self.queue_tokens -= tokens
                self.queue_texts -= texts
        self._count_turn(task, builder.tokens, bulk_first=bulk_first)
        return Batch(task.name, slices, sum(builder.tokens), sum(builder.texts))

    def _next_turn(self) -> tuple[_Task | None, bool]:
        """The task of the next batch, and whether a bulk request goes first in it."""
        waiting = [[task for task in self._tasks.values() if task.lanes[bulk].requests] for bulk in (False, True)]
        bulk = bool(waiting[True]) and (not waiting[False] or self._batches_before_bulk >= BULK_TURN - 1)
        return min(waiting[bulk], key=lambda task: task.lanes[bulk].served, default=None), bulk

    def _take_out(self, lane: _Lane, slices: list[Slice]) -> None:
        """Remove the texts of a batch from their lane."""
        requests, sizes = lane.requests, self._sizes[lane.bulk]
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

    def _count_turn(self, task: _Task, tokens: list[int], *, bulk_first: bool) -> None:
        first = task.lanes[bulk_first]
        self._served[bulk_first] = first.served
        first.served += max(tokens[bulk_first], self._token_budget // SMALLEST_TURN)
        if bulk_first:  # interactive tokens count in any batch; bulk tokens only in a batch that serves bulk first
            task.lanes[False].served += tokens[False]
        self._batches_before_bulk = self._batches_before_bulk + 1 if self._sizes[True].tokens and not bulk_first else 0

    def _lane_of(self, key: Hashable) -> _Lane | None:
        for task in self._tasks.values():
            for lane in task.lanes:
                if key in lane.requests:
                    return lane
        return None

    def _drop(self, lane: _Lane, request: Request) -> int:
        tokens, texts = request.waiting_tokens, request.waiting_texts
        del lane.requests[request.key]
        lane.tokens -= tokens
        lane.texts -= texts
        self.queue_tokens -= tokens
        self.queue_texts -= texts
        self._sizes[request.bulk].count(tokens, -1)
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
            lanes = [lane for task in self._tasks.values() for lane in task.lanes]
            requests = [piece.request for lane in lanes for piece in lane.requests.values()]
            left = [each for each in requests if each.deadline < float("inf")]
            self._deadlines = [(each.deadline, next(self._numbers), each.key) for each in left]
            heapq.heapify(self._deadlines)


@dataclass(slots=True, eq=False)
class _Lane:
    """The waiting interactive requests of one task, or the waiting bulk requests."""

    bulk: bool
    # The next text of each request, least recently served first.
    requests: OrderedDict[Hashable, Slice] = field(default_factory=OrderedDict)
    tokens: int = 0
    texts: int = 0
    served: int = 0  # tokens of its turns; the lane with the fewest is next
    # Fair queueing's virtual time (Demers, Keshav and Shenker, 1989): the tokens that a request would have had by now,
    # had it waited from the beginning, with divisible texts and exactly equal shares.
    level: float = 0.0


@dataclass(slots=True, eq=False)
class _Task:
    """The waiting requests of one task."""

    name: Hashable
    lanes: tuple[_Lane, _Lane] = field(default_factory=lambda: (_Lane(bulk=False), _Lane(bulk=True)))

    @property
    def tokens(self) -> int:
        return self.lanes[False].tokens + self.lanes[True].tokens

    @property
    def texts(self) -> int:
        return self.lanes[False].texts + self.lanes[True].texts


class _Sizes:
    """A histogram of waiting requests and their tokens, by powers of two of a request's tokens."""

    def __init__(self) -> None:
        self._requests = [0] * 64
        self._tokens = [0] * 64
        self.tokens = 0

    def count(self, tokens: int, requests: int) -> None:
        """Add `requests` requests of `tokens` waiting tokens each; a negative number removes them."""
        size = tokens.bit_length()
        self._requests[size] += requests
        self._tokens[size] += requests * tokens
        self.tokens += requests * tokens

    def up_to(self, tokens: int) -> int:
        """At least the sum of all requests' waiting tokens, each counted up to `tokens`; at most twice the sum."""
        return sum(min(held, count * tokens) for count, held in zip(self._requests, self._tokens, strict=True) if count)


class _BatchBuilder:
    """A batch being filled."""

    def __init__(self, token_budget: int, text_budget: int) -> None:
        self.tokens_left = token_budget
        self.texts_left = text_budget
        self.tokens, self.texts = [0, 0], [0, 0]  # of interactive and of bulk requests
        self._starts: tuple[dict[Request, int], ...] = {}, {}  # first text taken, of requests that may get more
        self._slices: tuple[list[Slice], ...] = [], []  # of the others

    def slices(self, lane: _Lane) -> list[Slice]:
        """The slices taken from a lane."""
        starts = self._starts[lane.bulk]
        return self._slices[lane.bulk] + [request.piece(first, request.taken) for request, first in starts.items()]

    def take(self, request: Request, tokens: int, texts: int) -> int:
        """Take the request's next texts, as many as fit into `tokens`, `texts` and the batch; returns their tokens."""
        offsets, first = request.offsets, request.taken
        limit = offsets[first] + min(tokens, self.tokens_left)
        stop = min(bisect_right(offsets, limit, first) - 1, first + texts, first + self.texts_left)
        if stop <= first:
            return 0
        bulk = request.bulk
        self._starts[bulk].setdefault(request, first)
        request.taken = stop
        taken = offsets[stop] - offsets[first]
        self.tokens[bulk] += taken
        self.texts[bulk] += stop - first
        self.tokens_left -= taken
        self.texts_left -= stop - first
        return taken

    def take_all(self, lane: _Lane) -> None:
        """Take everything in a lane; it must fit."""
        slices = self._slices[lane.bulk]
        for piece in lane.requests.values():
            request = piece.request
            texts = len(request.offsets) - 1
            slices.append(piece if piece.stop == texts else request.piece(piece.start, texts))
        self.tokens[lane.bulk] = lane.tokens
        self.texts[lane.bulk] = lane.texts

    def take_one_each(self, lane: _Lane) -> bool:
        """Take one text of each request, from the front of the lane on. True if all of them fitted."""
        tokens_left, texts_left, skips_left = self.tokens_left, self.texts_left, SKIPPED_TEXTS
        starts = self._starts[lane.bulk]
        taken: list[Slice] = []
        # In a batch that serves bulk first, the front request of the bulk lane has had its text.
        for piece in islice(lane.requests.values(), int(_front(lane) in starts), None):
            if piece.tokens > tokens_left:
                skips_left -= 1
                if not skips_left:
                    break
                continue
            taken.append(piece)
            tokens_left -= piece.tokens
            texts_left -= 1
            if not tokens_left or not texts_left:
                break
        self.tokens[lane.bulk] += self.tokens_left - tokens_left
        self.texts[lane.bulk] += len(taken)
        self.tokens_left, self.texts_left = tokens_left, texts_left
        if skips_left < SKIPPED_TEXTS or not tokens_left or not texts_left:
            self._slices[lane.bulk].extend(taken)
            return False
        for piece in taken:
            starts[piece.request] = piece.start
            piece.request.taken = piece.stop
        return True


def _front(lane: _Lane) -> Request:
    return next(iter(lane.requests.values())).request


def _share(builder: _BatchBuilder, lane: _Lane) -> None:
    """Share the rest of a batch, which cannot hold everything, between the requests of a lane."""
    if not lane.requests or not builder.tokens_left or not builder.texts_left:
        return
    if len(lane.requests) <= EXACT_REQUESTS:
        builder.take(_front(lane), builder.tokens_left, texts=1)  # least recently served: so it never starves
    elif not builder.take_one_each(lane):
        return
    # Give equal shares until no text fits into one: a request that needs less leaves the rest to the others.
    unsatisfied = [piece.request for piece in lane.requests.values() if piece.request.waiting_texts]
    while unsatisfied and builder.tokens_left and builder.texts_left:
        tokens = builder.tokens_left // len(unsatisfied)
        texts = max(1, builder.texts_left // len(unsatisfied))
        if not sum([builder.take(request, tokens, texts) for request in unsatisfied]):
            break
        unsatisfied = [request for request in unsatisfied if request.waiting_texts]
    # The rest goes text by text to the requests furthest behind. It must not go to those that had least: those are the
    # newest, and of 128 equal requests at a time the slowest 1 % would take six times as long as the mean.
    unsatisfied = sorted(
        (request for request in unsatisfied if request.waiting_texts), key=lambda request: request.level
    )
    while unsatisfied and builder.tokens_left and builder.texts_left:
        unsatisfied = [
            request
            for request in unsatisfied
            if builder.take(request, builder.tokens_left, texts=1) and request.waiting_texts
        ]
