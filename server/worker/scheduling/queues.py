"""The waiting requests of each model: a queue of two lanes, and a histogram of what is in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from embert.server.worker.scheduling.requests import Slice

__all__ = ["BatchLimits", "Lane", "ModelQueue", "Sizes"]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How large a batch of a model may be, and what it takes."""

    tokens: int
    texts: int
    longest_text: int  # tokens; one longer than `tokens` is a batch of its own
    cost_s: Callable[[int], float]  # tokens of a batch → the seconds that it is expected to take

    @classmethod
    def of(
        cls,
        tokens: int,
        texts: int | None = None,
        longest_text: int | None = None,
        cost_s: Callable[[int], float] = float,
    ) -> BatchLimits:
        """`texts` None: only tokens limit a batch. `longest_text` None: `tokens`. By default a token costs a second."""
        return cls(tokens, tokens if texts is None else texts, max(tokens, longest_text or 0), cost_s)


@dataclass(slots=True, eq=False)
class Lane:
    """The waiting interactive requests of one model, or its waiting bulk requests."""

    bulk: bool
    # The next text of each request, least recently served first.
    requests: OrderedDict[Hashable, Slice] = field(default_factory=OrderedDict)
    tokens: int = 0
    texts: int = 0
    served_s: float = 0.0  # device time of its turns; the lane with the least is next
    # Fair queueing's virtual time (Demers, Keshav and Shenker, 1989): the tokens that a request would have had by now,
    # had it waited from the beginning, with divisible texts and exactly equal shares.
    level: float = 0.0


@dataclass(slots=True, eq=False)
class ModelQueue:
    """The waiting requests of one model."""

    name: Hashable
    limits: BatchLimits
    lanes: tuple[Lane, Lane] = field(default_factory=lambda: (Lane(bulk=False), Lane(bulk=True)))
    sizes: tuple[Sizes, Sizes] = field(default_factory=lambda: (Sizes(), Sizes()))  # of each lane's requests

    @property
    def tokens(self) -> int:
        """Tokens that wait."""
        return self.lanes[False].tokens + self.lanes[True].tokens

    @property
    def texts(self) -> int:
        """Texts that wait."""
        return self.lanes[False].texts + self.lanes[True].texts

    @property
    def fits(self) -> bool:
        """Whether one batch holds everything."""
        return self.tokens <= self.limits.tokens and self.texts <= self.limits.texts

    @property
    def full(self) -> bool:
        """Whether a batch cannot gain from waiting."""
        return self.tokens >= self.limits.tokens or self.texts >= self.limits.texts


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
