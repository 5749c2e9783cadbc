"""Records to the protocol's own spans. Only the exporting process imports this.

OpenTelemetry's SDK takes 120 to 140 µs of CPU to make the spans of a request and as much to encode them; this takes a
tenth of that for both, since it writes the protocol's fields itself (wire.py).
"""

from __future__ import annotations

import random
from functools import lru_cache

from opentelemetry.trace import TraceState

from embert.server.observability.tracing.records import BatchRecord, RequestRecord, Stage
from embert.server.observability.tracing.trace_context import SPAN_BYTES, TRACE_BYTES
from embert.server.observability.tracing.wire import SERVER, attribute, link, span

__all__ = ["SpanBuilder"]

_CLIENT_LEFT = 499
_METHODS = frozenset(("CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"))
_OTHER_METHOD = "_OTHER"  # OpenTelemetry's word, as are the names of attributes without `embert.`


class SpanBuilder:
    """Makes spans as fields of a ScopeSpans: joined, those of several records are of one."""

    clock_ns = 0  # added to a record's times it gives Unix time; the caller keeps it current

    def of(self, record: RequestRecord | BatchRecord, process: str) -> bytes:
        """The spans of a record that `process` sent; `record.spans` says how many they are."""
        return self._of_request(record, process) if isinstance(record, RequestRecord) else self._of_batch(record)

    def _of_request(self, record: RequestRecord, process: str) -> bytes:
        trace, state = record.trace_id, _state(record.state)
        root = span(
            _root_name(record.method, record.route),
            *self._unix(record.started, record.ended),
            trace,
            record.span_id,
            record.parent_id,
            state,
            kind=SERVER,
            is_remote=bool(record.parent_id),
            failed=_is_error(record),
            reason=record.reason,
            more=b"".join(_attributes(record, process)),
        )
        return b"".join([*(self._of_stage(stage, trace, record.span_id, state) for stage in record.stages), root])

    def _of_stage(self, stage: Stage, trace: bytes, parent: bytes, state: str) -> bytes:
        started, ended = self._unix(stage.started, stage.ended)
        failed = bool(stage.reason)
        return span(
            stage.name, started, ended, trace, _random(SPAN_BYTES), parent, state, failed=failed, reason=stage.reason
        )

    def _of_batch(self, record: BatchRecord) -> bytes:
        trace, batch = _random(TRACE_BYTES), _random(SPAN_BYTES)
        started, ended = self._unix(record.started, record.ended)
        failed = bool(record.reason)
        engine, to_batch = _kept("embert.engine", record.engine), link(trace, batch)
        spans, links = [], []
        for member in record.members:
            context, ids = member.context, TRACE_BYTES + SPAN_BYTES
            request, parent, state = context[:TRACE_BYTES], context[TRACE_BYTES:ids], _state(context[ids:])
            links.append(link(request, parent, state))
            if member.admitted:
                queued, _ = self._unix(member.admitted, 0.0)
                spans.append(span("queue", queued, started, request, _random(SPAN_BYTES), parent, state))
            more = b"%b%b%b%b" % (
                engine,
                _kept("embert.texts", member.texts),
                _kept("embert.tokens", member.tokens),
                to_batch,
            )
            spans.append(
                span(
                    "inference",
                    started,
                    ended,
                    request,
                    _random(SPAN_BYTES),
                    parent,
                    state,
                    failed=failed,
                    reason=record.reason,
                    more=more,
                )
            )
        attributes = (
            engine,
            _kept("embert.batch.texts", record.texts),
            _kept("embert.batch.tokens", record.tokens),
            _kept("embert.batch.requests", record.requests),
        )
        more = b"".join((*attributes, *links))
        spans.append(span("batch", started, ended, trace, batch, failed=failed, reason=record.reason, more=more))
        return b"".join(spans)

    def _unix(self, started: float, ended: float) -> tuple[int, int]:
        return round(started * 1e9) + self.clock_ns, round(ended * 1e9) + self.clock_ns


def _root_name(method: str, route: str) -> str:
    verb = method if method in _METHODS else "HTTP"
    return f"{verb} {route}" if route else verb


def _is_error(record: RequestRecord) -> bool:
    return record.status >= 500 or bool(record.exception)


def _attributes(record: RequestRecord, process: str) -> list[bytes]:
    attributes = [
        _kept("http.request.method", record.method if record.method in _METHODS else _OTHER_METHOD),
        _kept("url.scheme", record.scheme),
        attribute("embert.request_id", record.request_id),
        _kept("embert.process", process),
    ]
    if record.route:
        attributes += _kept("http.route", record.route), attribute("url.path", record.path)
    if record.model:
        priority = "bulk" if record.bulk else "interactive"
        attributes += _kept("embert.model", record.model), _kept("embert.priority", priority)
    if record.texts:
        attributes += _kept("embert.texts", record.texts), _kept("embert.tokens", record.tokens)
    if record.status == _CLIENT_LEFT:
        attributes.append(_kept("embert.client_left", True))
    elif record.status:
        attributes.append(_kept("http.response.status_code", record.status))
    if _is_error(record):
        attributes.append(_kept("error.type", record.exception or str(record.status)))
    return attributes


# For values that come again and again, and that no client makes long. `typed`: True is no 1.
_kept = lru_cache(4096, typed=True)(attribute)


def _state(header: bytes) -> str:
    """The members of `tracestate`; empty where one is malformed."""
    return TraceState.from_header([header.decode("latin-1")]).to_header() if header else ""


def _random(size: int) -> bytes:
    return random.getrandbits(8 * size).to_bytes(size)
