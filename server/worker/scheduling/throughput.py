"""Estimates from past batches: how busy the device is, how fast a model's queue is worked off, when a batch ends.

Pure: the caller passes all times.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

__all__ = ["BusyTime", "ThroughputEstimate"]


@dataclass(slots=True)
class BusyTime:
    """When the device ran batches, of whichever model. Times are seconds on the caller's clock."""

    last_ended: float = 0.0
    total_s: float = 0.0
    _spans: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=4096))

    def add(self, started: float, ended: float) -> float:
        """Count a batch; returns the seconds that the device spent on it, without the wait for the batch before."""
        self._spans.append((max(started, self.last_ended), ended))
        seconds = max(0.0, ended - max(started, self.last_ended))
        self.last_ended = ended
        self.total_s += seconds
        return seconds

    def ratio(self, now: float, window_s: float = 5.0) -> float:
        """The share of the last `window_s` in which a batch ran."""
        since = now - window_s
        return sum(max(0.0, end - max(start, since)) for start, end in list(self._spans)) / window_s


@dataclass(slots=True)
class ThroughputEstimate:
    """Of one model: fed with every batch of it; predicts the next ones."""

    _tokens: float = 0.0  # of about the last ten batches that left others waiting
    _seconds: float = 0.0  # ... and the time they took
    _fixed_s: float = 0.0  # shortest time of a batch, without its tokens
    _token_s: float = 0.0  # shortest time of one more token
    _share: float = 1.0  # of the shortest time; the prediction

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second while there is a queue; 0 before the first batch."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def add_batch(self, seconds: float, tokens: int, *, queued: bool) -> None:
        """Count a batch that the device spent so long on; `queued` when it left others of the model waiting."""
        seconds = max(seconds, self.shortest_s(tokens))
        # A batch that leaves nobody waiting may be small, and small batches are slow for their size. It counts only if
        # it was faster than the rate: then the rate is too low, and may itself be the reason that there is no queue.
        if queued or tokens * self._seconds > self._tokens * seconds > 0:
            self._tokens = 0.9 * self._tokens + tokens
            self._seconds = 0.9 * self._seconds + seconds

    def calibrate(self, fixed_s: float, token_s: float) -> None:
        """Set the shortest time of a batch: `fixed_s`, and `token_s` for each token."""
        self._fixed_s, self._token_s = fixed_s, token_s

    def shortest_s(self, tokens: int) -> float:
        """The shortest time of a batch; next to nothing before `calibrate`."""
        return max(self._fixed_s + tokens * self._token_s, 1e-6)

    def note_prediction(self, *, too_long: bool) -> None:
        """Learn from a batch that was awaited until shortly before its predicted end.

        `too_long`: it had ended before. Predictions then shrink, and recover slowly. They never exceed the calibrated
        time: an awaited batch never ends before it is looked at, so measuring it would confirm any prediction that a
        pause of the machine has made too long.
        """
        self._share = 0.7 * self._share if too_long else min(1.0, 1.02 * self._share)

    def expected_s(self, tokens: int) -> float:
        """The least time that a batch is expected to take; 0 before `calibrate`."""
        return self._share * (self._fixed_s + tokens * self._token_s)
