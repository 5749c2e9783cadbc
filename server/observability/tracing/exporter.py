"""Spans to a collector over OTLP/HTTP, in a thread. A dead or slow collector costs spans alone."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans
from opentelemetry.sdk.trace.export import SpanExportResult

from embert.server.observability.tracing.settings import shown
from embert.server.observability.tracing.trace_metrics import TraceMetrics
from embert.server.observability.tracing.wire import Value, field, key_value

__all__ = ["SpanQueue"]

log = logging.getLogger(__name__)

# Unless OTEL_BSP_MAX_QUEUE_SIZE, …_MAX_EXPORT_BATCH_SIZE and …_SCHEDULE_DELAY say otherwise. A span takes half a kB.
WAITING_SPANS = 8192  # for the collector
BATCH_SPANS = 2048  # of one export: each is an HTTP request, so few large ones cost less
DELAY_MS = 5000  # until spans leave that are too few for a batch


class _Request(bytes):
    """A message that is encoded already, as OpenTelemetry's exporter wants it."""

    __slots__ = ()

    def SerializePartialToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """As of a protobuf message."""
        return self


class SpanQueue:
    """Spans that wait for the collector, and the thread that exports them."""

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
        self._limit = _number(environment, "OTEL_BSP_MAX_QUEUE_SIZE", WAITING_SPANS)
        self._batch = min(_number(environment, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH_SPANS), self._limit)
        self._delay_s = _number(environment, "OTEL_BSP_SCHEDULE_DELAY", DELAY_MS) / 1000
        attributes = [key_value(key, value) for key, value in resource.items()]
        # Of the request that an export sends: what stands before the spans.
        self._resource = ResourceSpans(resource=Resource(attributes=attributes)).SerializeToString()
        self._scope = ScopeSpans(scope=InstrumentationScope(name="embert", version=version)).SerializeToString()
        trace_exporter.encode_spans = self._request  # type: ignore[assignment, attr-defined]  # they are encoded
        self._collector = _Collector(trace_exporter.OTLPSpanExporter(url), shown(url), metrics)
        self._metrics = metrics
        self._changed = threading.Condition()  # of what is below
        self._records: deque[tuple[bytes, int]] = deque()  # the spans of one, and how many they are
        self._queued = 0  # spans in them
        self._waiting = 0  # with those that are being exported
        self._closes = False
        self._thread = threading.Thread(target=self._run, name="export", daemon=True)
        self._thread.start()

    def put(self, spans: bytes, count: int) -> None:
        """Export the spans of a record soon, or drop them where too many wait already."""
        with self._changed:
            if fits := self._waiting + count <= self._limit:
                self._records.append((spans, count))
                self._waiting += count
                self._queued += count
                if self._queued >= self._batch:
                    self._changed.notify()
        if not fits:
            self._metrics.dropped.inc(count)

    def close(self) -> None:
        """Export what waits. The caller's process is killed if this takes too long."""
        with self._changed:
            self._closes = True
            self._changed.notify()
        self._thread.join()
        self._collector.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closes or self._queued >= self._batch, self._delay_s)
                records, count = self._take()
                if not records and self._closes:
                    return
            if records:
                try:
                    self._collector.export(records, count)
                finally:
                    with self._changed:
                        self._waiting -= count

    def _take(self) -> tuple[list[bytes], int]:
        """The records of the next export, oldest first, and how many spans they have."""
        taken: list[bytes] = []
        count = 0
        while self._records and (not taken or count + self._records[0][1] <= self._batch):
            spans, of_record = self._records.popleft()
            taken.append(spans)
            count += of_record
        self._queued -= count
        return taken, count

    def _request(self, records: Sequence[bytes]) -> _Request:
        """An ExportTraceServiceRequest."""
        scope_spans = b"".join((self._scope, *records))
        return _Request(field(1, self._resource + field(2, scope_spans)))


def _number(environment: Mapping[str, str], name: str, usual: int) -> int:
    given = environment.get(name, "").strip()
    return int(given) if given.isdecimal() and int(given) else usual


class _Collector:
    """The exporter of OpenTelemetry's SDK. Says once that the collector does not take spans, and counts them."""

    def __init__(self, exporter: trace_exporter.OTLPSpanExporter, where: str, metrics: TraceMetrics) -> None:
        """`where` is the collector, for the log."""
        self._exporter, self._where, self._metrics = exporter, where, metrics
        self._lost = 0  # since the collector last took spans
        self._said = _LastMessages()
        # Its own lines come with every try.
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [self._said], False

    def export(self, records: list[bytes], count: int) -> None:
        """Send the spans of these records, so many in all; what the collector does not take is dropped."""
        self._said.texts.clear()
        try:
            result = self._exporter.export(records)  # type: ignore[arg-type]  # see SpanQueue._request
        except Exception as error:  # noqa: BLE001 - of a library: the thread goes on
            self._said.texts.append(f"{type(error).__name__}: {error}")
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self._metrics.exported.inc(count)
            if self._lost:
                log.info("%s takes spans again; %d were lost", self._where, self._lost)
                self._lost = 0
        else:
            self._metrics.dropped.inc(count)
            if not self._lost:
                said = "; ".join(self._said.texts) or "it gives no reason"
                log.warning("%s takes no spans, they are dropped until it does: %s", self._where, said)
            self._lost += count

    def close(self) -> None:
        """Close its connections."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class _LastMessages(logging.Handler):
    """Keeps the last lines: the last but one tells why it was tried again, the last that it was given up."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: deque[str] = deque(maxlen=2)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
