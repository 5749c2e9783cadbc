"""How busy the encoder was lately, and how fast it works a queue off. Pure: times are the caller's."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

__all__ = ["Pace"]


@dataclass(slots=True)
class Pace:
    """How busy the encoder was lately, and how fast it works a queue off."""

    _tokens: float = 0.0  # of the last ten batches or so that left others waiting
    _seconds: float = 0.0  # ... and the time they took
    _last_ended: float = 0.0
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
        if queued:
            self._tokens = 0.9 * self._tokens + tokens
            self._seconds = 0.9 * self._seconds + max(ended - started, 1e-6)

    def busy_ratio(self, now: float, window_s: float = 5.0) -> float:
        """The part of the last `window_s` in which a batch ran."""
        since = now - window_s
        return sum(max(0.0, end - max(start, since)) for start, end in list(self._spans)) / window_s
