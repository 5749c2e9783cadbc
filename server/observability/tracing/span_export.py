"""Exports the spans of one process with OpenTelemetry's SDK. A dead or slow collector costs only spans."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider, sampling
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer

from embert import __version__
from embert.server.observability.metrics import SpanMetrics
from embert.server.observability.tracing.settings import shown

log = logging.getLogger(__name__)

WAITING_SPANS = 8192  # default of OTEL_BSP_MAX_QUEUE_SIZE, in spans for the collector of about 2 kB
FLUSH_S = 2.0  # limit for the delay of a process's end by a collector
RESPONSE_BYTES, RESPONSE_S = 65_536, 5.0  # limits for a collector's response, which has a few bytes


def start_span_export(url: str, instance: str, sampler: sampling.Sampler | None = None) -> SpanExport | None:
    """Starts the export of this process's spans. Returns None and logs a line if OpenTelemetry's variables are invalid.

    `instance` is a unique name of this server. Without a sampler OpenTelemetry's variables select the spans.
    """
    try:
        return SpanExport(url, instance, sampler)
    except (OSError, ValueError) as error:
        log.error("spans cannot be exported, serving without traces: %s", error)  # noqa: TRY400
        return None


class SpanExport:
    """A tracer, and OpenTelemetry's thread that sends its spans."""

    def __init__(self, url: str, instance: str, sampler: sampling.Sampler | None) -> None:
        """The SDK reads headers, compression, certificates and times from OpenTelemetry's own variables."""
        metrics = SpanMetrics()
        provider = tracer_provider(sampler, _resource(instance))  # first: its warnings about variables are logged
        exporter = _CountingExporter(OTLPSpanExporter(url, session=_BoundedSession()), shown(url), metrics)
        self._processor = _BoundedProcessor(exporter, metrics)
        provider.add_span_processor(self._processor)
        self.tracer: Tracer = provider.get_tracer("embert", __version__)

    def close(self) -> None:
        """Exports the waiting spans, for FLUSH_S at most."""
        # The processor's own limit is 30 s.
        thread = threading.Thread(target=self._processor.shutdown, name="last-spans", daemon=True)
        thread.start()
        thread.join(FLUSH_S)
        if thread.is_alive():
            log.warning("the collector did not accept the last spans within %g s; they are lost", FLUSH_S)


def tracer_provider(sampler: sampling.Sampler | None, resource: Resource) -> TracerProvider:
    """Creates OpenTelemetry's provider, without a processor."""
    return TracerProvider(
        sampler=sampler,
        resource=resource,
        shutdown_on_exit=False,
        span_limits=SpanLimits(max_links=SpanLimits.UNSET),  # a batch is linked to all of its requests
    )


def clock_offset_ns() -> int:
    """Returns Unix time minus CLOCK_MONOTONIC, which perf_counter reads too, by the fastest of some readings.

    Times of one request or batch are converted with one offset: the machine's time may be set.
    """
    return max(time.time_ns() - time.monotonic_ns() for _ in range(4))


class _BoundedProcessor(BatchSpanProcessor):
    """Drops and counts new spans while too many wait: OpenTelemetry's class drops old ones and counts none."""

    def __init__(self, exporter: _CountingExporter, metrics: SpanMetrics) -> None:
        text = os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
        self._limit = int(text) if text.isdecimal() and int(text) else WAITING_SPANS
        self._exporter, self._metrics = exporter, metrics
        self._accepted = 0  # spans, written by the thread that ends them
        super().__init__(exporter, max_queue_size=self._limit)

    def on_end(self, span: ReadableSpan) -> None:
        if self._accepted - self._exporter.finished >= self._limit:
            self._metrics.dropped.inc()
            return
        self._accepted += 1
        super().on_end(span)


class _BoundedSession(requests.Session):
    """Reads at most RESPONSE_BYTES of a response, in RESPONSE_S: a collector's response may never end."""

    def request(self, *args: Any, **options: Any) -> requests.Response:
        """Sends a request. The response has no content: the exporter reads the status and the header fields."""
        response = super().request(*args, **{**options, "stream": True})
        until, left = time.monotonic() + RESPONSE_S, RESPONSE_BYTES
        with contextlib.suppress(Exception):  # the status has arrived, and the rest is not used
            while left > 0 and time.monotonic() < until and (piece := response.raw.read1(left)):
                left -= len(piece)
        response._content = b""
        response.close()  # keeps the connection if the response has ended
        return response

    def get_redirect_target(self, resp: requests.Response) -> None:
        """Returns None: requests reads the whole response before it follows a redirect."""


class _CountingExporter(SpanExporter):
    """Counts spans, and logs once that the collector does not accept them."""

    def __init__(self, exporter: SpanExporter, collector: str, metrics: SpanMetrics) -> None:
        """`collector` is its URL for the log."""
        self._exporter, self._collector, self._metrics = exporter, collector, metrics
        self.finished = 0  # spans that were sent or dropped
        self._lost = 0  # spans since the collector last accepted some
        self._messages = _LastMessages()
        # OpenTelemetry logs every attempt, and quotes malformed headers of clients.
        logging.getLogger("opentelemetry").handlers = [logging.NullHandler()]
        logging.getLogger("opentelemetry").propagate = False
        logging.getLogger("opentelemetry.exporter").handlers = [self._messages]

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._messages.texts.clear()
        try:
            result = self._exporter.export(spans)
        finally:
            self.finished += len(spans)
        if result is SpanExportResult.SUCCESS:
            self._metrics.exported.inc(len(spans))
            if self._lost:
                log.info("%s accepts spans again; %d were lost", self._collector, self._lost)
                self._lost = 0
        else:
            self._metrics.dropped.inc(len(spans))
            if not self._lost:
                reason = "; ".join(self._messages.texts) or "no reason given"
                log.warning("%s does not accept spans, dropping them: %s", self._collector, reason)
            self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _LastMessages(logging.Handler):
    """Keeps the last two lines: the reason of a retry, and the end of the retries."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: deque[str] = deque(maxlen=2)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _resource(instance: str) -> Resource:
    """Returns attributes of all spans; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence."""
    own = {
        "service.name": "embert",
        "service.version": __version__,
        "service.instance.id": instance,
        "host.name": platform.node(),
    }
    return Resource.create({**own, **OTELResourceDetector().detect().attributes})
