"""Spans of requests in an HTTP process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from embert.server.observability.logs import trace_id as logged_trace_id
from embert.server.observability.request_record import CLIENT_LEFT, INTERACTIVE, RequestRecord
from embert.server.observability.tracing.span_export import clock_offset_ns

REASON_MAX = 512  # characters of an error's message
STATE_MAX = 512  # bytes of `tracestate`; the specification asks for no more, and clients write it
_METHODS = frozenset(("CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"))
_OTHER_METHOD = "_OTHER"  # OpenTelemetry's word, as are the names of attributes without `embert.`

Headers = Sequence[tuple[bytes, bytes]]


class _Headers(Getter[Headers]):
    """Headers of an ASGI scope for OpenTelemetry's propagator."""

    def get(self, carrier: Headers, key: str) -> list[str] | None:
        name = key.encode()
        values = [value.decode("latin-1") for header, value in carrier if header == name]
        if key == "traceparent":
            return values if len(values) == 1 else None  # the specification ignores several
        return values if sum(map(len, values)) <= STATE_MAX else None

    def keys(self, carrier: Headers) -> list[str]:
        return [header.decode("latin-1") for header, _ in carrier]


_HEADERS = _Headers()
_PROPAGATOR = TraceContextTextMapPropagator()


class RequestTracer:
    """Begins the traces of requests of one HTTP process, on its event loop."""

    def __init__(self, tracer: Tracer, process: str, quiet: frozenset[str]) -> None:
        """`process` is its name. `quiet` are routes that start no trace, because probes use them all the time."""
        self._tracer, self._process, self._quiet = tracer, process, quiet

    def begin(self, scope: Scope, route: str, started: float, *, called: bool = True) -> RequestTrace | None:
        """Returns the trace of a request, or None if it is not sampled.

        `route` is its label in metrics. With `called`, the headers may name the trace of a caller. Log lines have the
        id of the trace from now on, also if the caller's trace is not sampled.
        """
        context = _PROPAGATOR.extract(scope["headers"], Context(), _HEADERS) if called else Context()
        parent = get_current_span(context).get_span_context()
        if parent.is_valid:
            logged_trace_id.set(f"{parent.trace_id:032x}")
        elif route in self._quiet:
            return None
        method = scope["method"] if scope["method"] in _METHODS else _OTHER_METHOD
        verb = "HTTP" if method == _OTHER_METHOD else method
        known = route.startswith("/")
        offset_ns = clock_offset_ns()
        span = self._tracer.start_span(
            f"{verb} {route}" if known else verb,
            context,
            SpanKind.SERVER,
            start_time=round(started * 1e9) + offset_ns,
        )
        if not span.is_recording():
            return None
        attributes = {
            "http.request.method": method,
            "url.scheme": scope["scheme"],
            "embert.process": self._process,
        }
        if known:
            attributes |= {"http.route": route, "url.path": scope["path"]}
        trace = RequestTrace(self._tracer, span, offset_ns, attributes)
        logged_trace_id.set(trace.trace_id.hex())
        return trace


class RequestTrace:
    """A sampled request. Times are seconds of CLOCK_MONOTONIC, which perf_counter reads too."""

    __slots__ = ("_attributes", "_context", "_offset_ns", "_span", "_tracer", "exception", "reason", "texts", "tokens",
                 "trace_id")  # fmt: skip

    def __init__(self, tracer: Tracer, span: Span, offset_ns: int, attributes: dict[str, Any]) -> None:
        self._tracer, self._span, self._offset_ns, self._attributes = tracer, span, offset_ns, attributes
        self._context = set_span_in_context(span, Context())
        self.trace_id = span.get_span_context().trace_id.to_bytes(16)
        self.texts = self.tokens = 0
        self.reason = ""  # message of an error response
        self.exception = ""  # name of the exception that the app raised

    @property
    def context(self) -> bytes:
        """Trace context for an engine: trace id [16], id of the request's span [8], `tracestate`."""
        span = self._span.get_span_context()
        return self.trace_id + span.span_id.to_bytes(8) + span.trace_state.to_header().encode("latin-1")

    def tokenized(self, ended: float, seconds: float, texts: int, tokens: int) -> None:
        """Adds texts and their tokens, and exports the time of tokenizing them."""
        self.texts += texts
        self.tokens += tokens
        self.stage("tokenize", ended - seconds, ended)

    def stage(self, name: str, started: float, ended: float, reason: str = "") -> None:
        """Exports a stage of the request. `reason` is the message of a failure."""
        span = self._tracer.start_span(name, self._context, start_time=self._unix_ns(started))
        if reason:
            span.set_status(StatusCode.ERROR, reason[:REASON_MAX])
        span.end(self._unix_ns(ended))

    def end(self, record: RequestRecord, ended: float) -> None:
        """Exports the request after its response, or after its client has left."""
        attributes, status = self._attributes, record.status
        attributes["embert.request_id"] = record.id.decode()
        if record.model:
            attributes["embert.model"] = record.model
            attributes["embert.priority"] = record.priority or INTERACTIVE
        if self.texts:
            attributes |= {"embert.texts": self.texts, "embert.tokens": self.tokens}
        if status == CLIENT_LEFT:
            attributes["embert.client_left"] = True
        elif status:
            attributes["http.response.status_code"] = status
        if status >= 500 or self.exception:
            attributes["error.type"] = self.exception or str(status)
            self._span.set_status(StatusCode.ERROR, self.reason[:REASON_MAX])
        self._span.set_attributes(attributes)
        self._span.end(self._unix_ns(ended))

    def _unix_ns(self, moment: float) -> int:
        return round(moment * 1e9) + self._offset_ns
