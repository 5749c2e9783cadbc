"""The scheduler's types: requests, slices of them, batches."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

__all__ = ["Batch", "Charge", "Request", "Slice"]


@dataclass(slots=True, eq=False)
class Request:
    """All texts of one HTTP request. `payload` belongs to the caller; the scheduler does not read it."""

    key: Hashable
    lengths: Sequence[int]  # tokens of each text, all ≥ 1
    model: Hashable = None  # a batch is of one model
    deadline: float = float("inf")  # on the caller's clock; it must not start later
    low_priority: bool = False
    payload: Any = None
    offsets: list[int] = field(init=False)  # prefix sums of lengths, [n + 1]
    taken: int = field(default=0, init=False)  # texts already in a batch, of a large request
    # Deficit round robin: the tokens that it may still take in this round. Negative after a text longer than that.
    deficit: int = field(default=0, init=False)
    has_quantum: bool = field(default=False, init=False)  # of this round, and has not used it up

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

    @property
    def next_tokens(self) -> int:
        """Tokens of the first text that waits."""
        return self.offsets[self.taken + 1] - self.offsets[self.taken]

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
    texts: int
    charged: Charge | None = None  # None: made of parts of another batch
