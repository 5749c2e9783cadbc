"""How busy the encoder was lately, how fast it works a queue off, and when the batch at work will end.

Pure: times are the caller's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

__all__ = ["Pace"]


@dataclass(slots=True)
class Pace:
    """What the batches of the encoder say about the next ones."""

    _tokens: float = 0.0  # of the last ten batches or so that left others waiting
    _seconds: float = 0.0  # ... and the time they took
    _last_ended: float = 0.0
    _lately: list[float] = field(default_factory=lambda: [0.0] * 5)  # sums of 1, x, y, x², xy; x: tokens, y: seconds
    _spans: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=4096))

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second while there is a queue: small batches of an idle server say nothing about that."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def add(self, started: float, ended: float, tokens: int, *, queued: bool) -> None:
        """Note a batch; `queued` when it left others waiting."""
        started = max(started, self._last_ended)  # it may have waited for the batch before
        self._last_ended = ended
        self._spans.append((started, ended))
        x, y = float(tokens), ended - started
        for i, value in enumerate((1.0, x, y, x * x, x * y)):
            self._lately[i] = 0.95 * self._lately[i] + value
        if queued:
            self._tokens = 0.9 * self._tokens + tokens
            self._seconds = 0.9 * self._seconds + max(ended - started, 1e-6)

    def expected_end(self, started: float, tokens: int) -> float:
        """When a batch that was handed over at `started` will end: a straight line through the last twenty or so.

        `started` itself while nothing is known.
        """
        n, x, y, xx, xy = self._lately
        if not n:
            return started
        spread = n * xx - x * x
        slope = max(0.0, (n * xy - x * y) / spread) if spread > 1e-6 * n * xx else 0.0
        return max(started, self._last_ended) + max(0.0, y / n + slope * (tokens - x / n))

    def busy_ratio(self, now: float, window_s: float = 5.0) -> float:
        """The part of the last `window_s` in which a batch ran."""
        since = now - window_s
        return sum(max(0.0, end - max(start, since)) for start, end in list(self._spans)) / window_s
