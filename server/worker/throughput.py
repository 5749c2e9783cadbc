"""Estimates from past batches: how busy the encoder is, how fast it works off a queue, when the running batch ends.

Pure: the caller passes all times.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

__all__ = ["ThroughputEstimate"]


@dataclass(slots=True)
class ThroughputEstimate:
    """Fed with every batch of the encoder; predicts the next ones. Times are seconds on the caller's clock."""

    _tokens: float = 0.0  # of about the last ten batches that left others waiting
    _seconds: float = 0.0  # ... and the time they took
    _last_ended: float = 0.0
    _fixed_s: float = 0.0  # shortest time of a batch, without its tokens
    _token_s: float = 0.0  # shortest time of one more token
    _share: float = 1.0  # of the shortest time; the prediction
    _spans: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=4096))

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second while there is a queue; 0 before the first batch."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def add_batch(self, started: float, ended: float, tokens: int, *, queued: bool) -> None:
        """Count a batch; `queued` when it left others waiting."""
        started = max(started, self._last_ended)  # it may have waited for the batch before
        self._last_ended = ended
        self._spans.append((started, ended))
        seconds = max(ended - started, self._fixed_s + tokens * self._token_s, 1e-6)
        # A batch that leaves nobody waiting may be small, and small batches are slow for their size. It counts only if
        # it was faster than the rate: then the rate is too low, and may itself be the reason that there is no queue.
        if queued or tokens * self._seconds > self._tokens * seconds > 0:
            self._tokens = 0.9 * self._tokens + tokens
            self._seconds = 0.9 * self._seconds + seconds

    def calibrate(self, fixed_s: float, token_s: float) -> None:
        """Set the shortest time of a batch: `fixed_s`, and `token_s` for each token."""
        self._fixed_s, self._token_s = fixed_s, token_s

    def note_prediction(self, *, too_long: bool) -> None:
        """Learn from a batch that was awaited until shortly before its predicted end.

        `too_long`: it had ended before. Predictions then shrink, and recover slowly. They never exceed the calibrated
        time: an awaited batch never ends before it is looked at, so measuring it would confirm any prediction that a
        pause of the machine has made too long.
        """
        self._share = 0.7 * self._share if too_long else min(1.0, 1.02 * self._share)

    def expected_end(self, started: float, tokens: int) -> float:
        """The earliest end of a batch submitted at `started`; before `calibrate`, the end of the batch before it."""
        return max(started, self._last_ended) + self._share * (self._fixed_s + tokens * self._token_s)

    def busy_ratio(self, now: float, window_s: float = 5.0) -> float:
        """The share of the last `window_s` in which a batch ran."""
        since = now - window_s
        return sum(max(0.0, end - max(start, since)) for start, end in list(self._spans)) / window_s
