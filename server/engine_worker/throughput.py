"""Estimates from past batches: the load of the device, the rate of a model, the end of a batch.

Pure: the caller passes all times.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_MEMORY = 10.0  # batches of one size that are remembered
_OUTLIER = 2.0  # limit of a duration, as a multiple of recent ones of that size
_SHORTEST = 0.5  # limit of what is learned, as a share of the calibrated time: the machine may have been busy then
_LEAST_WEIGHT = 0.05  # of full batches long ago; of smaller ones in proportion to their tokens


@dataclass(slots=True)
class BusyTime:
    """The times at which the device ran batches of any model, in seconds of the caller's clock."""

    last_ended: float = 0.0
    _spans: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=4096))

    def add(self, started: float, ended: float) -> float:
        """Count a batch. Returns the seconds that the device spent on it, without the wait for the batch before."""
        self._spans.append((max(started, self.last_ended), ended))
        seconds = max(0.0, ended - max(started, self.last_ended))
        self.last_ended = ended
        return seconds

    def ratio(self, now: float, window_s: float = 5.0) -> float:
        """The share of the last `window_s` in which a batch ran."""
        since = now - window_s
        return sum(max(0.0, end - max(start, since)) for start, end in list(self._spans)) / window_s


@dataclass(slots=True)
class _Size:
    """Batches of about one size: means of the last ones."""

    tokens: float
    seconds: float
    batches: int
    last: int  # the number of the last one among all batches


@dataclass(slots=True)
class ThroughputEstimate:
    """The cost of one model's batches: a fixed time and a time for each token, fitted to every batch.

    The line is fitted by least squares of relative errors to the means of each size of batches (powers of two). Recent
    batches weigh most, but a size is updated only by batches of that size. So a thousand batches of single short texts,
    which take their fixed time, do not change the estimate of full ones.
    """

    batch_tokens: int  # of a full batch
    _line: tuple[float, float] | None = None  # seconds: fixed, and for a token. One tuple: another thread reads it
    _shortest: tuple[float, float] = (0.0, 0.0)  # what `calibrate` measured, as `_line`
    _sizes: dict[int, _Size] = field(default_factory=dict)  # see `_size`
    _batches: int = 0
    _share: float = 1.0  # of the shortest time; the prediction

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second in full batches; 0 before `calibrate`."""
        return self.batch_tokens / self.seconds(self.batch_tokens) if self._line else 0.0

    @property
    def fixed_s(self) -> float:
        """The part of a batch's time that does not depend on its tokens; 0 before `calibrate`."""
        return self._line[0] if self._line else 0.0

    def seconds(self, tokens: int) -> float:
        """The expected seconds of a batch; near 0 before `calibrate`."""
        return max(_line_s(self._line, tokens), 1e-6) if self._line else 1e-6

    def tokens_within(self, seconds: float) -> int:
        """Tokens of a batch that takes `seconds`, at most a full one; 0 if an empty batch takes longer."""
        if self._line is None or _line_s(self._line, self.batch_tokens) <= seconds:
            return self.batch_tokens
        fixed_s, token_s = self._line
        return max(0, int((seconds - fixed_s) / token_s))

    def calibrate(self, fixed_s: float, token_s: float) -> None:
        """Set the shortest time of a batch, which is the first estimate: `fixed_s`, and `token_s` for each token."""
        line = self._line = self._shortest = (max(fixed_s, 1e-9), max(token_s, 1e-12))
        for tokens in (1, self.batch_tokens):
            self._sizes[self._size(tokens)] = _Size(tokens, _line_s(line, tokens), 3, 0)

    def add_batch(self, seconds: float, tokens: int) -> None:
        """Learn from the device time of a batch. Does nothing before `calibrate`."""
        if self._line is None:
            return
        # If the end of a batch is noticed late, it seems long, and the next one too short.
        seconds = max(seconds, _SHORTEST * _line_s(self._shortest, tokens))
        expected_s = _line_s(self._line, tokens)
        self._batches += 1
        size = self._sizes.get(self._size(tokens))
        if size is None:
            seconds = min(seconds, _OUTLIER * expected_s)
            self._sizes[self._size(tokens)] = _Size(tokens, seconds, 1, self._batches)
        else:
            usual_s = expected_s * size.seconds / _line_s(self._line, size.tokens)
            size.batches, size.last = size.batches + 1, self._batches
            share = max(1 / size.batches, 1 / _MEMORY)
            size.tokens += share * (tokens - size.tokens)
            size.seconds += share * (min(seconds, _OUTLIER * usual_s) - size.seconds)
        self._line = self._fit(self._line)

    def _size(self, tokens: int) -> int:
        """Size class of a batch: 1 for more than half of a full one, 2 for more than a quarter, and so on."""
        return (self.batch_tokens // tokens).bit_length()

    def _fit(self, line: tuple[float, float]) -> tuple[float, float]:
        """The line with the least sum of weight · (error / time by the last line)², both parts in bounds."""
        ones = tokens = squares = seconds = products = 0.0
        for size in self._sizes.values():
            recent: float = (1 - 1 / _MEMORY) ** (self._batches - size.last)
            weight = max(recent, _LEAST_WEIGHT * size.tokens / self.batch_tokens) / _line_s(line, size.tokens) ** 2
            ones += weight
            tokens += weight * size.tokens
            squares += weight * size.tokens**2
            seconds += weight * size.seconds
            products += weight * size.tokens * size.seconds
        least_fixed, least_token = _SHORTEST * self._shortest[0], _SHORTEST * self._shortest[1]
        determinant = ones * squares - tokens**2
        token_s = (ones * products - tokens * seconds) / determinant if determinant > 1e-9 * ones * squares else 0.0
        token_s = max(token_s, least_token)
        fixed_s = (seconds - token_s * tokens) / ones
        if fixed_s < least_fixed:
            fixed_s, token_s = least_fixed, max((products - least_fixed * tokens) / squares, least_token)
        return fixed_s, token_s

    def note_prediction(self, *, too_long: bool) -> None:
        """Learn from a batch that was awaited until shortly before its predicted end.

        If it had ended before (`too_long`), predictions shrink, and recover slowly. They never exceed the calibrated
        time: an awaited batch never ends before the loop looks, so measuring it would confirm any prediction that a
        pause of the machine has made too long.
        """
        self._share = 0.7 * self._share if too_long else min(1.0, 1.02 * self._share)

    def expected_s(self, tokens: int) -> float:
        """Shortest expected time of a batch; 0 before `calibrate`."""
        return self._share * min(_line_s(self._shortest, tokens), _line_s(self._line, tokens)) if self._line else 0.0


def _line_s(line: tuple[float, float], tokens: float) -> float:
    return line[0] + line[1] * tokens
