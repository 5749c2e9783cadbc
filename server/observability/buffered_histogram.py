"""A histogram that writes many observations at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from prometheus_client import Histogram

__all__ = ["BufferedHistogram"]


class BufferedHistogram:
    """A histogram that collects observations in a list and writes them together.

    One `Histogram.observe` costs 1.5 µs and a request makes eight observations: a tenth of its whole cost.
    """

    def __init__(self, histogram: Histogram, bounds: Sequence[float]) -> None:
        self._histogram, self._bounds = histogram, np.array(bounds)
        self._values: list[float] = []
        self.observe = self._values.append
        self.observe_many = self._values.extend

    def write(self) -> None:
        """Do for all collected values what `Histogram.observe` does for one: add to a bucket and to the sum."""
        if not self._values:
            return
        counts = np.bincount(np.searchsorted(self._bounds, self._values), minlength=len(self._bounds) + 1)
        for bucket in counts.nonzero()[0].tolist():
            self._histogram._buckets[bucket].inc(int(counts[bucket]))
        self._histogram._sum.inc(float(np.sum(self._values)))
        self._values.clear()
