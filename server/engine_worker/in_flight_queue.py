"""The batches on a device, in the order of their submission, and the next step of the device loop.

Pure: the caller passes all times, which are seconds of its clock.

A batch of a small model takes the device no longer than its answer takes the host. So submission comes first. While
the device has less than `AHEAD_S` of work left, full batches are submitted before answers are made, and the loop waits
for a batch that has already ended in order to submit the next one. Up to `UNANSWERED_MAX` answers are delayed by that;
they are made while the device runs a longer batch.

A batch that is submitted ahead delays requests that arrive later. So there is never more than one batch beyond
`AHEAD_S`, or beyond the running one. While interactive requests come, a batch that low-priority requests lead is
submitted only `LOW_PRIORITY_LEAD_S` before the device is expected to need it, because an interactive request that
arrives until then goes first. The answers of interactive requests also go before those of low-priority requests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from embert.engine import Task, TaskOutput
from embert.engine.errors import EncoderError
from embert.server.engine_worker.batching import runs_isolated
from embert.server.engine_worker.loaded_model import LoadedModel
from embert.server.engine_worker.scheduling import Batch

__all__ = ["InFlightBatch", "InFlightQueue"]

BATCHES_OF_A_MODEL = 2  # in flight; an encoder takes no more
UNANSWERED_MAX = 3
AHEAD_S = 0.0015  # an answer takes the host 0.1 to 1.5 ms
# The next batch is submitted this long before the expected end of the running one: the time that submitting takes plus
# the error of the expectation.
LEAD_MIN_S = 0.0005
LEAD_SHARE = 0.15  # of the time left
LEAD_TIME_LEFT_MAX_S = 0.1  # beside a longer batch the gap does not matter, and an error would cost more
LOW_PRIORITY_LEAD_S = 0.002  # time for interactive requests to arrive, without an idle gap on the device
_ENDED_S = 0.0003  # from so long before its expected end on, a batch counts as ended: less than an answer takes


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A batch on the encoder of its model."""

    batch: Batch
    model: LoadedModel
    ticket: Any  # an EncoderError when submitting failed
    started: float
    slot: int  # in the shared counters
    expected_end: float = 0.0  # of this and all before it
    ended: float = 0.0
    seconds: float = 0.0  # of the device's time
    lead_s: float = 0.0  # from the submission of what waited to the expected end; 0: none was submitted that way
    rows: dict[Task, TaskOutput] | EncoderError | None = None  # set when it has ended; None: the encoder was lost
    is_low_priority: bool = field(init=False)  # no interactive request has a text in it

    def __post_init__(self) -> None:
        self.is_low_priority = all(piece.request.low_priority for piece in self.batch.slices)

    @property
    def began(self) -> float:
        """When the device was free for it."""
        return self.ended - self.seconds

    @property
    def lets_others_follow(self) -> bool:
        """Whether a batch may be submitted behind it."""
        return self.model.submits_ahead and not runs_isolated(self.batch)

    @property
    def expected_s(self) -> float:
        """Of the device's time."""
        return self.model.throughput.expected_s(self.batch.tokens)


class InFlightQueue:
    """Flights in the order of their submission, and those that have ended and are not answered."""

    def __init__(self) -> None:
        self.in_flight: deque[InFlightBatch] = deque()
        self.unanswered: deque[InFlightBatch] = deque()
        self._free_at = 0.0  # when the device is expected to be idle

    def expect(self, flight: InFlightBatch) -> None:
        """Count a flight that starts: sets its `expected_end`."""
        self._free_at = flight.expected_end = max(self._free_at, flight.started) + flight.expected_s

    def left_s(self, now: float) -> float:
        """How long the device is expected to be busy; negative when it should have ended."""
        return self._free_at - now

    def note_end(self, flight: InFlightBatch) -> None:
        """A flight has ended; it is not in `in_flight` any more."""
        rest_s = flight.ended + sum(other.expected_s for other in self.in_flight)
        # Batches of one model run one after the other. Those of several models may run side by side, so what is behind
        # this one may have ended, too.
        is_serial = all(other.model is flight.model for other in self.in_flight)
        self._free_at = rest_s if is_serial else min(self._free_at, rest_s)

    def full_models(self) -> frozenset[int]:
        """The numbers of the models whose encoder takes no other batch."""
        numbers = [flight.model.number for flight in self.in_flight]
        return frozenset(number for number in numbers if numbers.count(number) >= BATCHES_OF_A_MODEL)

    @property
    def may_grow(self) -> bool:
        """Whether a batch may be submitted behind the last one."""
        last = self.in_flight or self.unanswered
        return not last or last[-1].lets_others_follow

    def wants_full(self, now: float) -> bool:
        """Whether a full batch is to be submitted now, of interactive requests at least."""
        return len(self.in_flight) == 1 or self.wants_low_priority(now)

    def wants_low_priority(self, now: float) -> bool:
        """Whether a full batch is to be submitted now, also one of low-priority requests only."""
        return self.left_s(now) < AHEAD_S and (len(self.in_flight) == 1 or bool(self.unanswered))

    def lead_s(self, now: float, *, full: bool) -> float:
        """How long before its expected end a batch is to be submitted behind the only one; 0: not at all.

        `full`: a full batch of low-priority requests waits, else it would have been submitted.
        """
        left_s = self.left_s(now)
        if len(self.in_flight) != 1 or not self.may_grow or left_s >= LEAD_TIME_LEFT_MAX_S:
            return 0.0
        if full:
            return max(0.0, min(left_s, LOW_PRIORITY_LEAD_S))
        return max(LEAD_MIN_S, LEAD_SHARE * left_s) if left_s > 2 * LEAD_MIN_S else 0.0

    def next_answer(self) -> InFlightBatch | None:
        """Which flight is answered next: the oldest with interactive requests, or else the oldest."""
        return next(
            (flight for flight in self.unanswered if not flight.is_low_priority), next(iter(self.unanswered), None)
        )

    def waits_before(self, answer: InFlightBatch, now: float, *, more_waits: bool) -> bool:
        """Whether the oldest flight is waited for before `answer` is made; `more_waits`: a full batch could follow."""
        if not self.in_flight or len(self.unanswered) >= UNANSWERED_MAX:
            return False
        oldest, answer_s = self.in_flight[0], answer.model.answer_s
        if answer.is_low_priority and not oldest.is_low_priority and oldest.expected_end - now < answer_s:
            return True
        return more_waits and self.left_s(now) < answer_s and oldest.expected_end - now < _ENDED_S
