"""The bucket bounds of the latency histograms."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HOST_BUCKETS_S", "REQUEST_BUCKETS_S", "LatencyBuckets"]

# A step of about two each: a quantile read from them is off by less than half. Every bound is a series for each set of
# labels, so each histogram has only those in which its observations fall.
HOST_BUCKETS_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
REQUEST_BUCKETS_S = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LatencyBuckets:
    """In seconds, rising."""

    request: tuple[float, ...] = REQUEST_BUCKETS_S  # of requests, queue and inference
    host: tuple[float, ...] = HOST_BUCKETS_S  # of what the HTTP process computes: tokenize, encode

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> LatencyBuckets:
        """The same bounds for all histograms; without any, the defaults."""
        return cls(bounds, bounds) if bounds else cls()
