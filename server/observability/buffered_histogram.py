"""Histograms that write many observations at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from embert.server.observability.request_record import RequestRecord

if TYPE_CHECKING:
    from prometheus_client import Histogram

__all__ = ["BufferedHistogram", "RequestHistogram"]


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
        buckets = np.searchsorted(self._bounds, self._values)
        counts = np.bincount(buckets, minlength=len(self._bounds) + 1)
        for bucket in counts.nonzero()[0].tolist():
            self._histogram._buckets[bucket].inc(int(counts[bucket]))
        self._histogram._sum.inc(float(np.sum(self._values)))
        self._note(buckets)
        self._values.clear()

    def _note(self, buckets: npt.NDArray[np.intp]) -> None:
        """Do more with the values, whose buckets these are."""


class RequestHistogram(BufferedHistogram):
    """One that knows of each bucket the last request that fell into it."""

    def __init__(self, histogram: Histogram, bounds: Sequence[float]) -> None:
        super().__init__(histogram, bounds)
        self._records: list[RequestRecord] = []
        self.newest: dict[int, tuple[RequestRecord, float, float]] = {}  # by bucket: request, seconds, Unix time

    def observe_request(self, record: RequestRecord, seconds: float) -> None:
        """Observe the duration of a request."""
        self._values.append(seconds)
        self._records.append(record)

    def _note(self, buckets: npt.NDArray[np.intp]) -> None:
        now = time.time()
        for bucket, record, seconds in zip(buckets.tolist(), self._records, self._values, strict=True):
            self.newest[bucket] = record, seconds, now
        self._records.clear()
