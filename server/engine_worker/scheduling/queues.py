"""The waiting requests of each model: a queue of two lanes, each with its small and its large requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

from embert.server.engine_worker.scheduling.requests import Request, Slice

__all__ = ["QUANTA", "BatchCost", "BatchLimits", "Lane", "ModelQueue", "Sizes"]

# The quantum of deficit round robin is a batch divided by QUANTA. With the default batches of a GPU it holds a request
# of 32 passages, which then runs in one or two batches. With smaller quanta everything after the scheduler costs
# more, because it costs per slice; with larger ones a request waits longer for its round (docs/experiments.md).
QUANTA = 4
SKIPPED_MAX = 32  # requests with a deficit that are skipped in one step: their texts are longer than a quantum
SMALL_SHARE = 8  # a request of at most a quantum divided by this is small: it goes first


class BatchCost(Protocol):
    """The durations of a model's batches."""

    def seconds(self, tokens: int) -> float:
        """The time that a batch of so many tokens is expected to take."""
        ...

    def tokens_within(self, seconds: float) -> int:
        """The tokens of a batch that is expected to take so long; 0 where even the shortest takes longer."""
        ...

    @property
    def fixed_s(self) -> float:
        """The part of that time which does not depend on the tokens."""
        ...


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a model's batches, and their durations."""

    tokens: int
    texts: int
    longest_text: int  # tokens; one longer than `tokens` is a batch of its own
    cost: BatchCost
    quantum_tokens: int
    quantum_texts: int
    small_tokens: int
    small_texts: int

    @classmethod
    def of(cls, cost: BatchCost, tokens: int, texts: int | None = None, longest_text: int | None = None) -> BatchLimits:
        """`texts` None: only tokens limit a batch. `longest_text` None: `tokens`."""
        texts = tokens if texts is None else texts
        quantum_tokens, quantum_texts = max(1, tokens // QUANTA), max(1, texts // QUANTA)
        return cls(
            tokens,
            texts,
            max(tokens, longest_text or 0),
            cost,
            quantum_tokens,
            quantum_texts,
            max(1, quantum_tokens // SMALL_SHARE),
            max(1, quantum_texts // SMALL_SHARE),
        )


@dataclass(slots=True, eq=False)
class Lane:
    """The waiting interactive requests of one model, or its waiting low-priority requests."""

    low_priority: bool
    quantum: int  # tokens
    small: OrderedDict[Hashable, Slice] = field(default_factory=OrderedDict)  # whole requests, in order of arrival
    large: OrderedDict[Hashable, Request] = field(default_factory=OrderedDict)  # in the order of their rounds
    sizes: Sizes = field(default_factory=lambda: Sizes())  # of the large ones
    tokens: int = 0
    texts: int = 0
    small_first: bool = False  # the last batch had no place for small requests that waited
    served_s: float = 0.0  # device time of its batches; the lane with the least is next

    @property
    def least_tokens(self) -> int:
        """Tokens of the text or small request that is next, 0 where none waits: a batch must hold them."""
        large = self.next_large()
        if large is None or (self.small_first and self.small):
            return next(iter(self.small.values())).tokens if self.small else 0
        return large.next_tokens

    def next_large(self) -> Request | None:
        """The large request that is next. It has its quantum of this round, and what the last round left of it."""
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
        """Tokens that wait."""
        return self.lanes[False].tokens + self.lanes[True].tokens

    @property
    def texts(self) -> int:
        """Texts that wait."""
        return self.lanes[False].texts + self.lanes[True].texts

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
