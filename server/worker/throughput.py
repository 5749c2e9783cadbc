"""How busy the encoder was lately, how fast it works a queue off, and when the batch at work will end.

Pure: times are the caller's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

__all__ = ["ThroughputEstimate"]


@dataclass(slots=True)
class ThroughputEstimate:
    """What the batches of the encoder say about the next ones."""

    _tokens: float = 0.0  # of the last ten batches or so that left others waiting
    _seconds: float = 0.0  # ... and the time they took
    _last_ended: float = 0.0
    _rest_s: float = 0.0  # of a batch, at the best
    _token_s: float = 0.0
    _share: float = 1.0  # of that, expected
    _spans: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=4096))

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second while there is a queue."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def add(self, started: float, ended: float, tokens: int, *, queued: bool) -> None:
        """Note a batch; `queued` when it left others waiting."""
        started = max(started, self._last_ended)  # it may have waited for the batch before
        self._last_ended = ended
        self._spans.append((started, ended))
        seconds = max(ended - started, self._rest_s + tokens * self._token_s, 1e-6)
        # A batch that left nobody waiting may be small, and small batches are slow for their size: it says nothing
        # unless it was faster than the rate. Then the rate is too low, and may itself be why there is no queue.
        if queued or tokens * self._seconds > self._tokens * seconds > 0:
            self._tokens = 0.9 * self._tokens + tokens
            self._seconds = 0.9 * self._seconds + seconds

    def learn(self, rest_s: float, token_s: float) -> None:
        """Note what a batch takes, at the best: so much, and so much for every token."""
        self._rest_s, self._token_s = rest_s, token_s

    def looked_for(self, *, was_over: bool) -> None:
        """Note whether a batch was over when it was looked for: then less is expected, for a while.

        Nothing is ever expected to take longer than at the best. To learn it from batches that are looked for when they
        are expected to end would confirm any expectation that a pause of the machine has made too long.
        """
        self._share = 0.7 * self._share if was_over else min(1.0, 1.02 * self._share)

    def expected_end(self, started: float, tokens: int) -> float:
        """When a batch that was handed over at `started` may end at the earliest.

        Without what `learn` is told: when the one before ended.
        """
        return max(started, self._last_ended) + self._share * (self._rest_s + tokens * self._token_s)

    def busy_ratio(self, now: float, window_s: float = 5.0) -> float:
        """The part of the last `window_s` in which a batch ran."""
        since = now - window_s
        return sum(max(0.0, end - max(start, since)) for start, end in list(self._spans)) / window_s
