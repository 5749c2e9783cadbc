"""Spans of batches with texts of sampled requests. Only engine processes with traces import this."""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)

from embert.server.engine_worker.batches import InFlightBatch
from embert.server.ipc.channel import SPAN_ID_BYTES, TRACE_ID_BYTES
from embert.server.observability.tracing.span_export import clock_offset_ns

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class BatchTracer:
    """Exports the spans of one engine process. Only the device loop uses it."""

    def __init__(self, tracer: Tracer, engine: int) -> None:
        self._tracer, self._engine = tracer, engine

    def record(self, flight: InFlightBatch, error: Exception | None = None) -> None:
        """Export the spans of a batch that has ended, unless it has no sampled request."""
        batch = flight.batch
        members = [
            (piece, message, _span_context(message.trace))
            for piece in batch.slices
            if (message := piece.request.message).trace
        ]
        if not members:
            return
        offset_ns = clock_offset_ns()
        started = flight.began if error is None else flight.started
        start_ns, end_ns = round(started * 1e9) + offset_ns, round(flight.ended * 1e9) + offset_ns
        batch_span = self._tracer.start_span(
            "batch",
            Context(),
            attributes={
                "embert.engine": self._engine,
                "embert.batch.texts": batch.texts,
                "embert.batch.tokens": batch.tokens,
                "embert.batch.requests": len(batch.slices),
            },
            links=[Link(request) for _, _, request in members],
            start_time=start_ns,
        )
        link = Link(batch_span.get_span_context())
        for piece, message, request in members:
            context = set_span_in_context(NonRecordingSpan(request), Context())
            if not piece.start:  # none of its texts has run before
                admitted_ns = round(message.admitted * 1e9) + offset_ns
                self._tracer.start_span("queue", context, start_time=admitted_ns).end(start_ns)
            inference = self._tracer.start_span(
                "inference",
                context,
                attributes={
                    "embert.engine": self._engine,
                    "embert.texts": piece.stop - piece.start,
                    "embert.tokens": piece.tokens,
                },
                links=[link],
                start_time=start_ns,
            )
            _end(inference, end_ns, error)
        _end(batch_span, end_ns, error)


def _end(span: Span, end_ns: int, error: Exception | None) -> None:
    if error is not None:
        span.set_status(StatusCode.ERROR, str(error))
    span.end(end_ns)


def _span_context(trace: bytes) -> SpanContext:
    """The context of a request's span; see RequestTrace.context."""
    ids = TRACE_ID_BYTES + SPAN_ID_BYTES
    trace_id, span_id = int.from_bytes(trace[:TRACE_ID_BYTES]), int.from_bytes(trace[TRACE_ID_BYTES:ids])
    state = TraceState.from_header([trace[ids:].decode("latin-1")]) if len(trace) > ids else None
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=_SAMPLED, trace_state=state)
