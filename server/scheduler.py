"""Decides which texts run together. Pure: no clock, no threads, no I/O, no torch; the engine process owns all of those.

Three rules, and why:

* **Late binding.** `next_batch` is called when the encoder is free, and takes what is there at that moment. A batch
  closed earlier would leave out what arrives while it waits. Only a *full* batch may be taken ahead (`full`), since
  waiting cannot improve it.
* **Token budget.** A batch is limited by its tokens, which is what a packed forward costs, not by its texts.
* **Fair share.** Every request in flight gets an equal share of each batch; what small ones leave goes to the larger
  ones. So a request of a thousand texts delays a request of one text by at most the batch that is already running, and
  is itself never starved. Bulk requests share what the others leave, and one text of theirs goes first in every eighth
  batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

__all__ = ["Batch", "Request", "Scheduler", "Slice"]

BULK_TURN = 8  # in every so many batches, a bulk request is served before the others


@dataclass(slots=True, eq=False)
class Request:
    """All texts of one HTTP request; `payload` is the caller's own and not looked at."""

    key: Hashable
    lengths: Iterable[int]  # tokens of each text, all ≥ 1
    task: Hashable = None  # a batch holds one task
    deadline: float = float("inf")  # on the caller's clock; not started later than this
    bulk: bool = False  # runs in what others leave
    payload: Any = None
    offsets: list[int] = field(init=False)  # prefix sums of lengths, [n + 1]
    taken: int = field(default=0, init=False)  # texts already in a batch

    def __post_init__(self) -> None:
        self.offsets = list(accumulate(self.lengths, initial=0))

    @property
    def texts(self) -> int:
        """Number of texts."""
        return len(self.offsets) - 1

    @property
    def waiting_texts(self) -> int:
        """Texts not yet in a batch."""
        return len(self.offsets) - 1 - self.taken

    @property
    def waiting_tokens(self) -> int:
        """Tokens not yet in a batch."""
        return self.offsets[-1] - self.offsets[self.taken]


@dataclass(slots=True, eq=False)
class Slice:
    """Consecutive texts `start` … `stop - 1` of one request."""

    request: Request
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Tokens of the slice."""
        return self.request.offsets[self.stop] - self.request.offsets[self.start]


@dataclass(slots=True, eq=False)
class Batch:
    """What one forward runs; at least one text."""

    task: Hashable
    slices: list[Slice]
    tokens: int
    texts: int


class Scheduler:
    """Requests in, batches out. Each text leaves once, in its order within its request, unless cancelled or expired."""

    def __init__(self, max_batch_tokens: int, max_batch_texts: int | None = None) -> None:
        """`max_batch_tokens` must not be below the longest text, or that text could never run."""
        self._token_budget = max_batch_tokens
        self._text_budget = max_batch_texts if max_batch_texts is not None else max_batch_tokens
        self._waiting: dict[Hashable, Request] = {}  # the one whose turn is longest ago stands first
        self._batches_before_bulk = 0  # in a row
        self._sizes = {bulk: _Sizes() for bulk in (False, True)}
        self.queue_tokens = 0
        self.queue_texts = 0

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError for a known key, a text of no tokens, or one longer than the budget."""
        if request.key in self._waiting:
            raise ValueError(f"request {request.key!r} is queued already")
        offsets = request.offsets
        for start, stop in pairwise(offsets):
            if not 1 <= stop - start <= self._token_budget:
                raise ValueError(f"a text of {stop - start} tokens cannot be in a batch of 1 to {self._token_budget}")
        if request.texts:
            self._waiting[request.key] = request
            self._sizes[request.bulk].count(request.waiting_tokens, 1)
            self.queue_tokens += request.waiting_tokens
            self.queue_texts += request.waiting_texts

    def cancel(self, key: Hashable) -> int:
        """Forget what still waits of a request; returns the number of texts dropped, 0 when none waits."""
        request = self._waiting.pop(key, None)
        return self._drop(request) if request is not None else 0

    def waiting(self) -> list[Hashable]:
        """Keys of the requests with texts still waiting."""
        return list(self._waiting)

    def expire(self, now: float) -> list[Request]:
        """Take out and return the requests whose deadline has passed."""
        late = [request for request in self._waiting.values() if request.deadline < now]
        for request in late:
            del self._waiting[request.key]
            self._drop(request)
        return late

    def ahead(self, tokens: int, *, bulk: bool) -> int:
        """Tokens of others that run before a new request of so many is done, if nothing more comes.

        In its turns, each of the others runs as many tokens as it does, or all it has. The answer is not less than that
        and at most twice as much.
        """
        mine = self._sizes[bulk].up_to(tokens)
        return mine + self._sizes[False].tokens if bulk else mine

    def full(self) -> bool:
        """True when the next batch can no longer gain from waiting."""
        if self.queue_tokens < self._token_budget and self.queue_texts < self._text_budget:
            return False
        tokens = texts = 0
        for request in self._candidates():
            tokens += request.waiting_tokens
            texts += request.waiting_texts
            if tokens >= self._token_budget or texts >= self._text_budget:
                return True
        return False

    def next_batch(self) -> Batch | None:
        """Form a batch from what waits now; None when nothing does."""
        candidates = self._candidates()
        if not candidates:
            return None
        filling = _Filling(self._token_budget, self._text_budget)
        if sum(request.waiting_tokens for request in candidates) <= self._token_budget:
            for request in candidates:
                filling.take(request, self._token_budget)
        else:
            self._fill(filling, candidates)
        batch = Batch(candidates[0].task, filling.slices(), self._token_budget - filling.tokens_left, filling.texts)
        self._settle(batch)
        return batch

    def _fill(self, filling: _Filling, candidates: list[Request]) -> None:
        """Choose from more than a batch can hold."""
        lanes = [[request for request in candidates if request.bulk is bulk] for bulk in (False, True)]
        if all(lanes):
            self._batches_before_bulk = (self._batches_before_bulk + 1) % BULK_TURN
            if not self._batches_before_bulk:
                filling.take(lanes[1][0], self._token_budget, texts=1)
        for lane in lanes:
            if lane:
                filling.take(lane[0], self._token_budget, texts=1)  # the longest unserved: never starved
                _share(filling, lane)

    def _candidates(self) -> list[Request]:
        first = next(iter(self._waiting.values()), None)
        if first is None:
            return []
        return [request for request in self._waiting.values() if request.task == first.task]

    def _settle(self, batch: Batch) -> None:
        self.queue_tokens -= batch.tokens
        self.queue_texts -= batch.texts
        for piece in batch.slices:
            request = self._waiting.pop(piece.request.key)
            sizes = self._sizes[request.bulk]
            sizes.count(request.waiting_tokens + piece.tokens, -1)
            if request.waiting_texts:
                self._waiting[request.key] = request  # to the end: the others' turn is longer ago
                sizes.count(request.waiting_tokens, 1)

    def _drop(self, request: Request) -> int:
        texts = request.waiting_texts
        self._sizes[request.bulk].count(request.waiting_tokens, -1)
        self.queue_tokens -= request.waiting_tokens
        self.queue_texts -= texts
        request.taken = request.texts
        return texts


class _Sizes:
    """How many requests wait and with how many tokens, by the power of two that these lie below."""

    def __init__(self) -> None:
        self._requests = [0] * 64
        self._tokens = [0] * 64
        self.tokens = 0

    def count(self, tokens: int, sign: int) -> None:
        """Add a request with so many waiting tokens, or with `sign` -1 take it out."""
        size = tokens.bit_length()
        self._requests[size] += sign
        self._tokens[size] += sign * tokens
        self.tokens += sign * tokens

    def up_to(self, tokens: int) -> int:
        """The sum over all requests of what waits, but of none more than `tokens`."""
        return sum(min(held, count * tokens) for count, held in zip(self._requests, self._tokens, strict=True) if count)


class _Filling:
    """A batch being filled."""

    def __init__(self, token_budget: int, text_budget: int) -> None:
        self.tokens_left = token_budget
        self.texts_left = text_budget
        self._starts: dict[Hashable, tuple[Request, int]] = {}

    def take(self, request: Request, tokens: int, texts: int | None = None) -> int:
        """Take the request's next texts, as many as fit into `tokens`, `texts` and the rest; returns their tokens."""
        offsets, first = request.offsets, request.taken
        limit = offsets[first] + min(tokens, self.tokens_left)
        stop = bisect_right(offsets, limit, first) - 1
        stop = min(stop, first + self.texts_left, first + texts if texts is not None else stop)
        if stop <= first:
            return 0
        self._starts.setdefault(request.key, (request, first))
        taken = offsets[stop] - offsets[first]
        request.taken = stop
        self.tokens_left -= taken
        self.texts_left -= stop - first
        return taken

    @property
    def texts(self) -> int:
        return sum(request.taken - first for request, first in self._starts.values())

    def slices(self) -> list[Slice]:
        return [Slice(request, first, request.taken) for request, first in self._starts.values()]


def _share(filling: _Filling, candidates: list[Request]) -> None:
    """Max-min fair filling of what is left of a batch that cannot hold everything."""
    # Equal shares, again and again while they let anybody in: a request that needs less leaves its rest to the others.
    hungry = [request for request in candidates if request.waiting_texts]
    while hungry and filling.tokens_left and filling.texts_left:
        tokens = filling.tokens_left // len(hungry)
        texts = max(1, filling.texts_left // len(hungry))
        if not sum([filling.take(request, tokens, texts) for request in hungry]):
            break
        hungry = [request for request in hungry if request.waiting_texts]
    # Texts are indivisible: the rest goes text by text, to the request that has had least so far.
    hungry = sorted(
        (request for request in hungry if request.waiting_texts), key=lambda request: request.offsets[request.taken]
    )
    while hungry and filling.tokens_left and filling.texts_left:
        hungry = [
            request
            for request in hungry
            if filling.take(request, filling.tokens_left, texts=1) and request.waiting_texts
        ]
