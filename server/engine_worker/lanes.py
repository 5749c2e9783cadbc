"""The waiting requests of each model, in two lanes, and how a batch takes texts out of them. Pure, like the scheduler.

A batch takes small requests first, then a quantum of each large one (deficit round robin). Every step takes texts, ends
a request's quantum or ends the batch, so a batch costs what is in it.

Tokens are counted tokens, except in `Request.offsets`, `Slice.tokens` and `Batch.tokens`: a long text counts as more
than it has, because attention takes time by the square of its length (engine/models/flops.py). A request with a text
that is a separate batch is a long one. Long requests share with all others by the tokens that they take, so a request
that waits next to any number of them waits for the text that is running.

A prefix that the texts of a request have in common counts once in each batch that has some of them. The request takes
as many further tokens of each batch, if it has them, so that it costs at most twice its tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from embert.engine.models.flops import PLAIN_TOKENS, TokenCounts
from embert.server.engine_worker.throughput import ThroughputEstimate

# The quantum of deficit round robin is a batch divided by QUANTA. With the default batches of a GPU it holds a request
# of 32 passages, which then runs in one or two batches. With smaller quanta everything after the scheduler costs
# more, because it costs per slice; with larger ones a request waits longer for its round (docs/experiments.md).
QUANTA = 4
SKIPPED_MAX = 32  # requests with a deficit that are skipped in one step: their texts are longer than a quantum
SMALL_SHARE = 8  # a request of at most a quantum divided by this is small: it goes first
SMALL_PART = 2  # small requests go first in a batch divided by this while large ones wait


class Request:
    """All texts of one HTTP request.

    `channel`, `message` and `weights` belong to the caller; the scheduler does not read them. `lengths` are the tokens
    of each text, all ≥ 1; the first `prefix` of them are common to all texts. `queries` are the first tokens of each
    text, to which its others do not attend, nor they to these; empty: none. `deadline` is on the caller's clock.
    """

    __slots__ = (
        "channel", "counted", "deadline", "deficit", "has_quantum", "key", "least", "lengths", "low_priority",
        "message", "model", "offsets", "prefix", "queries", "shared", "start", "texts", "tokens", "weights",
    )  # fmt: skip

    def __init__(
        self,
        key: Hashable,
        lengths: Sequence[int],
        model: Hashable = None,  # a batch is of one model
        deadline: float = float("inf"),
        low_priority: bool = False,
        channel: Any = None,
        message: Any = None,
        prefix: int = 0,
        queries: Sequence[int] = (),
    ) -> None:
        self.key, self.lengths, self.queries, self.model = key, lengths, queries, model
        self.deadline, self.low_priority = deadline, low_priority
        self.channel, self.message = channel, message
        self.weights = 0  # number in its sparse vectors so far
        self.texts = len(lengths)
        # Prefix sums of lengths, [texts + 1]. Most requests have one text, for which `accumulate` is slow.
        self.offsets = [0, lengths[0]] if self.texts == 1 else list(accumulate(lengths, initial=0))
        # Prefix sums of the counted tokens of texts after the prefix, [texts + 1]; the same list where that is all.
        self.counted = self.offsets
        self.prefix = self.shared = self.least = 0  # tokens that are common, counted; that a batch takes after them
        self.tokens = self.offsets[-1]  # counted
        if prefix:
            self.prefix = prefix
            self.count(prefix, lengths)
        self.start = 0  # first text of a large request that is in no batch yet
        # Deficit round robin: the tokens that it may still take in this round. Negative after a text longer than that.
        self.deficit = 0
        self.has_quantum = False  # part of its quantum of this round is left

    @property
    def waiting_texts(self) -> int:
        return self.texts - self.start

    @property
    def waiting_tokens(self) -> int:
        return self.tokens - self.counted[self.start] if self.start < self.texts else 0

    @property
    def next_tokens(self) -> int:
        """Tokens of the first text that waits; with a prefix, of the fewest texts that a batch takes."""
        counted, first = self.counted, self.start
        stop = first + 1
        if self.shared:
            stop = max(stop, bisect_right(counted, counted[first] + self.least, first) - 1)
        return self.shared + counted[stop] - counted[first]

    def count(self, shared: int, tokens: Sequence[int]) -> None:
        """Set the counted tokens of the prefix, and of each text with it."""
        self.shared = self.least = shared
        self.counted = list(accumulate([own - shared for own in tokens], initial=0))
        self.tokens = shared + self.counted[-1]

    def tokens_of(self, start: int, stop: int) -> int:
        """Tokens, not counted ones, of the texts `start` … `stop - 1` in one batch."""
        return self.offsets[stop] - self.offsets[start] - self.prefix * (stop - start - 1)

    def piece(self, start: int, stop: int) -> Slice:
        return Slice(self, start, stop, self.tokens_of(start, stop))


@dataclass(slots=True, eq=False)
class Slice:
    """Consecutive texts `start` … `stop - 1` of one request."""

    request: Request
    start: int
    stop: int
    tokens: int


@dataclass(slots=True, eq=False)
class BatchLimits:
    """The limits of a model's batches, and their durations."""

    cost: ThroughputEstimate
    tokens: int
    longest_text: int = 0  # in tokens, at least `tokens`; a text that counts as more than `tokens` is a separate batch
    counts: TokenCounts | None = None  # None: each text counts as its number of tokens
    quantum_tokens: int = field(init=False)
    small_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.longest_text = max(self.tokens, self.longest_text)
        self.quantum_tokens = max(1, self.tokens // QUANTA)
        self.small_tokens = max(1, self.quantum_tokens // SMALL_SHARE)

    def count(self, request: Request, longest: int) -> bool:
        """Count the tokens of a request with a text of `longest` tokens. True if it is a long request."""
        if longest > PLAIN_TOKENS and self.counts is not None:
            lengths, queries = request.lengths, request.queries
            if queries:
                lengths = [own - query for own, query in zip(lengths, queries, strict=True)]
            shared, *counts = self.counts.of([request.prefix, *lengths])
            if queries:
                counts = [own + query for own, query in zip(counts, self.counts.of(queries), strict=True)]
            request.count(shared, counts)
            longest = max(counts)
        request.least = min(request.least, self.longest_text - request.prefix)
        return longest > self.tokens


@dataclass(slots=True, eq=False)
class Lane:
    """The waiting interactive requests of one model, or its waiting low-priority requests."""

    low_priority: bool
    quantum: int  # tokens
    small: OrderedDict[Hashable, Slice] = field(default_factory=OrderedDict)  # whole requests, in order of arrival
    large: OrderedDict[Hashable, Request] = field(default_factory=OrderedDict)  # in the order of their rounds
    long: OrderedDict[Hashable, Request] = field(default_factory=OrderedDict)  # in order of arrival
    long_debt: int = 0  # tokens that others may take before the next text of a long request
    sizes: Sizes = field(default_factory=lambda: Sizes())  # of the large and the long ones
    tokens: int = 0
    texts: int = 0
    small_first: bool = False  # the last batch had no place for small requests that waited
    served_s: float = 0.0  # device time of its batches; the lane with the least is next

    @property
    def least_tokens(self) -> int:
        """Tokens of the next text or small request, which a batch must hold; 0 if none waits."""
        if self.long and self.long_is_next:
            return next(iter(self.long.values())).next_tokens
        large = self.next_large()
        if large is None or (self.small_first and self.small):
            return next(iter(self.small.values())).tokens if self.small else 0
        return large.next_tokens

    @property
    def long_is_next(self) -> bool:
        """True if waiting long requests are next: nothing else waits, or others have taken as much."""
        return not (self.long_debt and (self.small or self.large))

    def next_large(self) -> Request | None:
        """The next large request. It has its quantum of this round, and the rest of its last one."""
        large = self.large
        for _ in range(min(len(large), SKIPPED_MAX)):
            request = next(iter(large.values()))
            if request.has_quantum:
                return request
            # A single large request takes nothing from others, so it has no deficit to pay back.
            request.deficit = self.quantum + (request.deficit if len(large) > 1 else 0)
            if request.deficit > 0:
                break
            large.move_to_end(request.key)
        for request in large.values():
            request.has_quantum = True
            return request
        return None


@dataclass(slots=True, eq=False)
class ModelQueue:
    """The waiting requests of one model."""

    name: Hashable
    limits: BatchLimits
    lanes: tuple[Lane, Lane] = field(init=False)

    def __post_init__(self) -> None:
        quantum = self.limits.quantum_tokens
        self.lanes = Lane(low_priority=False, quantum=quantum), Lane(low_priority=True, quantum=quantum)

    @property
    def tokens(self) -> int:
        return self.lanes[False].tokens + self.lanes[True].tokens

    @property
    def texts(self) -> int:
        return self.lanes[False].texts + self.lanes[True].texts

    @property
    def full(self) -> bool:
        """True if the next batch cannot gain from waiting."""
        return self.tokens >= self.limits.tokens


class Sizes:
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


class BatchBuilder:
    """A batch being filled. It takes texts out of their lanes at once."""

    def __init__(self, limits: BatchLimits, tokens: int) -> None:
        """`tokens` is the size of this batch."""
        self.limits, self.tokens_left = limits, tokens
        self.tokens, self.texts = [0, 0], 0  # tokens of interactive and of low-priority requests
        self._small: list[Slice] = []  # small requests
        self._starts: dict[Request, int] = {}  # first text taken, of large and long requests
        self.surplus = 0  # counted tokens beyond those that the texts have
        self.waited = 0  # tokens that do not wait any more; the rest of a request waits with its prefix

    def slices(self) -> list[Slice]:
        return self._small + [request.piece(first, request.start) for request, first in self._starts.items()]

    def fill(self, lane: Lane, tokens: int) -> None:
        """Fill `tokens` tokens: small requests in a part of them, large ones, then small ones again."""
        reserved = max(0, self.tokens_left - tokens)
        self.tokens_left -= reserved
        if lane.tokens <= self.tokens_left:
            self._take_all(lane)
        else:
            if lane.long and lane.long_is_next:
                self._take_long(lane)
            if lane.small:
                self._take_small_first(lane)
            if lane.large:
                self._take_quanta(lane)
            if lane.small:
                self._take_small(lane, self.tokens_left)
        self.tokens_left += reserved

    def _take_all(self, lane: Lane) -> None:
        self._small += lane.small.values()
        again = 0  # tokens of prefixes that the batch has already
        debt = sum(request.waiting_tokens for request in lane.long.values())
        for requests in (lane.large, lane.long):
            if not requests:
                continue
            for request in requests.values():
                lane.sizes.count(request.waiting_tokens, -1)
                if request in self._starts:
                    again += request.shared
                self._start(request, request.texts)
            requests.clear()
        lane.small.clear()
        self._count(lane, lane.tokens - again, lane.texts, lane.tokens)
        if debt:
            lane.long_debt = debt

    def _take_long(self, lane: Lane) -> None:
        """Take the next texts of the first long request that fit. Others may then take as many tokens."""
        request = next(iter(lane.long.values()))
        before = request.waiting_tokens
        tokens = self._take(lane, request, self.tokens_left)
        if not tokens:
            return
        lane.sizes.count(before, -1)
        if rest := request.waiting_tokens:
            lane.sizes.count(rest, 1)
        else:
            del lane.long[request.key]
        lane.long_debt = tokens

    def _take_small_first(self, lane: Lane) -> None:
        """Take small requests, in half of the batch if large ones wait.

        The next text of the next large request has its place, too: otherwise texts as long as half of a batch would
        never run. In the batch after one that had no place for small requests, they go before it.
        """
        tokens, large = self.tokens_left, lane.next_large()
        if large is not None:
            tokens //= SMALL_PART
            if lane.small_first:
                tokens = max(tokens, next(iter(lane.small.values())).tokens)
            elif large.next_tokens <= self.tokens_left:
                tokens = min(tokens, self.tokens_left - large.next_tokens)
        lane.small_first = not self._take_small(lane, min(tokens, self.tokens_left))

    def _take_small(self, lane: Lane, tokens: int) -> bool:
        """Take small requests of at most `tokens` tokens together, first come, first served. True if there was one."""
        slices: list[Slice] = []
        tokens_left, texts = tokens, 0
        for piece in lane.small.values():
            if piece.tokens > tokens_left:
                break
            tokens_left -= piece.tokens
            texts += piece.stop
            slices.append(piece)
        if len(slices) == len(lane.small):
            lane.small.clear()
        else:
            for piece in slices:
                del lane.small[piece.request.key]
        self._count(lane, tokens - tokens_left, texts, tokens - tokens_left)
        self._small += slices
        return bool(slices)

    def _take_quanta(self, lane: Lane) -> None:
        """Take a quantum of each large request, round by round (deficit round robin; Shreedhar and Varghese, 1995).

        A request that the end of the batch interrupts goes on with its quantum in the next batch, before all others.
        The rest of a quantum counts in the next round, and so does a text that was longer. A remainder as small as a
        small request runs with the quantum before it.
        """
        large = lane.large
        while self.tokens_left and (request := lane.next_large()) is not None:
            before = request.waiting_tokens
            tokens = max(request.deficit, request.next_tokens)
            if before <= tokens + self.limits.small_tokens:
                tokens = before
            share = self._take(lane, request, tokens)
            if not share:
                return  # its next text does not fit
            lane.sizes.count(before, -1)
            rest = request.waiting_tokens
            if not rest:
                del large[request.key]
            else:
                lane.sizes.count(rest, 1)
                request.deficit -= share
                if request.next_tokens <= request.deficit:
                    return  # the batch is full, and the quantum is not used up
                request.has_quantum = False
                large.move_to_end(request.key)

    def _take(self, lane: Lane, request: Request, tokens: int) -> int:
        """Take the request's next texts that fit into `tokens` and the batch. Returns their tokens."""
        counted, first, before = request.counted, request.start, request.waiting_tokens
        tokens = min(tokens, self.tokens_left)
        shared = 0 if request in self._starts else request.shared
        if shared and tokens < request.next_tokens:
            return 0
        stop = bisect_right(counted, counted[first] + tokens - shared, first) - 1
        if stop <= first:
            return 0
        self._start(request, stop)
        total = shared + counted[stop] - counted[first]
        self._count(lane, total, stop - first, before - request.waiting_tokens)
        return total

    def _start(self, request: Request, stop: int) -> None:
        """Take the texts before `stop`."""
        first = self._starts.setdefault(request, request.start)
        if request.counted is not request.offsets:
            counted, start = request.counted, request.start
            shared = request.shared - request.prefix if first == start else 0
            tokens = request.tokens_of(start, stop) - request.prefix
            self.surplus += shared + counted[stop] - counted[start] - tokens
        request.start = stop

    def _count(self, lane: Lane, tokens: int, texts: int, waited: int) -> None:
        """Count texts of the batch. `waited` are those of `self.waited`."""
        if lane.long_debt:
            lane.long_debt = max(0, lane.long_debt - tokens)
        self.tokens[lane.low_priority] += tokens
        self.texts += texts
        self.tokens_left -= tokens
        self.waited += waited
        lane.tokens -= waited
        lane.texts -= texts
