"""Metrics of spans."""

from __future__ import annotations

from prometheus_client import Counter

__all__ = ["TraceMetrics"]


class TraceMetrics:
    """Written by the exporting process. The supervisor makes them too, so that they are there, at zero, without it."""

    def __init__(self) -> None:
        exported_help = "Spans that the collector has taken."
        self.exported = Counter("embert_spans_exported_total", exported_help, registry=None)
        dropped_help = "Spans that were dropped: the collector did not take them, or too many waited for it."
        self.dropped = Counter("embert_spans_dropped_total", dropped_help, registry=None)
