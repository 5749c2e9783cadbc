"""Spans to a collector over OTLP/HTTP, in a thread of OpenTelemetry's. A dead or slow collector costs spans alone."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from embert.server.observability.tracing.settings import shown
from embert.server.observability.tracing.spans import Value, pair
from embert.server.observability.tracing.trace_metrics import TraceMetrics

__all__ = ["SpanQueue"]

log = logging.getLogger(__name__)

WAITING_SPANS = 8192  # for the collector, unless OTEL_BSP_MAX_QUEUE_SIZE says otherwise; a span takes about half a kB


@dataclass(slots=True)
class _MadeSpan:
    """A span that is made already, in place of one of the SDK's."""

    data: bytes  # a ScopeSpans with nothing else in it
    context: ClassVar = SpanContext(1, 1, False, TraceFlags(TraceFlags.SAMPLED))


class SpanQueue:
    """Spans that wait for the collector."""

    def __init__(
        self,
        url: str,
        resource: Mapping[str, Value],
        version: str,
        metrics: TraceMetrics,
        environment: Mapping[str, str],
    ) -> None:
        """`resource` is what all spans say of this server, `version` is embert's.

        The exporter reads headers, compression, certificates and timeout from OpenTelemetry's own variables.
        """
        given = environment.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
        self._limit = int(given) if given.isdecimal() and int(given) else WAITING_SPANS
        self._metrics = metrics
        attributes = [pair(key, value) for key, value in resource.items()]
        self._around = ResourceSpans(
            resource=Resource(attributes=attributes),
            scope_spans=[ScopeSpans(scope=InstrumentationScope(name="embert", version=version))],
        )
        trace_exporter.encode_spans = self._request  # type: ignore[assignment, attr-defined]  # they are made already
        self._exporter = _Counting(trace_exporter.OTLPSpanExporter(url), shown(url), metrics)
        self._processor = BatchSpanProcessor(self._exporter, max_queue_size=self._limit)

    def put(self, spans: list[bytes]) -> None:
        """Export spans soon, or drop them where too many wait already."""
        if not self._exporter.expect(len(spans), self._limit):
            self._metrics.dropped.inc(len(spans))
            return
        for span in spans:
            self._processor.on_end(_MadeSpan(span))  # type: ignore[arg-type]

    def _request(self, spans: Sequence[_MadeSpan]) -> ExportTraceServiceRequest:
        request = ExportTraceServiceRequest(resource_spans=[self._around])
        request.resource_spans[0].scope_spans[0].MergeFromString(b"".join(span.data for span in spans))
        return request

    def close(self) -> None:
        """Export what waits. The caller's process is killed if this takes too long."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


class _Counting(SpanExporter):
    """An exporter that knows how many spans wait, and says once that the collector does not take them."""

    def __init__(self, exporter: SpanExporter, where: str, metrics: TraceMetrics) -> None:
        """`where` is the collector, for the log."""
        self._exporter, self._where, self._metrics = exporter, where, metrics
        self._lock = threading.Lock()
        self._waiting = 0
        self._lost = 0  # since the collector last took spans
        self._said = _LastMessages()
        # Its own lines come with every try.
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [self._said], False

    def expect(self, spans: int, limit: int) -> bool:
        """Count spans that will come to `export`. False where more than `limit` would wait."""
        with self._lock:
            if self._waiting + spans > limit:
                return False
            self._waiting += spans
        return True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See SpanExporter."""
        self._said.texts.clear()
        try:
            result = self._exporter.export(spans)
        finally:
            with self._lock:
                self._waiting -= len(spans)
        if result is SpanExportResult.SUCCESS:
            self._metrics.exported.inc(len(spans))
            if self._lost:
                log.info("%s takes spans again; %d were lost", self._where, self._lost)
                self._lost = 0
        else:
            self._metrics.dropped.inc(len(spans))
            if not self._lost:
                said = "; ".join(self._said.texts) or "it gives no reason"
                log.warning("%s takes no spans, they are dropped until it does: %s", self._where, said)
            self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        """See SpanExporter."""
        self._exporter.shutdown()


class _LastMessages(logging.Handler):
    """Keeps the last lines: the last but one tells why it was tried again, the last that it was given up."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: deque[str] = deque(maxlen=2)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
