"""The spans that HTTP and engine processes record, and the bounds of what waits for a collector, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
from collections.abc import Sequence
from contextvars import copy_context

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from embert.server.config import ServeConfig
from embert.server.frontend.routes import error_formats_by_path, labels_by_path
from embert.server.frontend.serve import RequestObserver, RequestServer
from embert.server.http.auth import Keys
from embert.server.http.held_bytes import HeldBytes
from embert.server.observability import logs
from embert.server.observability.http_metrics import HttpMetrics

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry's exporter is of the extra otel")
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from embert.server.observability.tracing import span_export
from embert.server.observability.tracing.request_trace import STATE_MAX, RequestTracer
from embert.server.observability.tracing.span_export import tracer_provider

ALL, NONE = sampling.DEFAULT_ON, sampling.DEFAULT_OFF  # of the requests without a caller's span
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = b"traceparent", f"00-{TRACE}-{SPAN}-01".encode()
MARKER = "xyzzy-7f3a-marker"
Headers = list[tuple[bytes, bytes]]


class Recorder:
    """A tracer, and the spans that it has recorded."""

    def __init__(self, sampler: sampling.Sampler = sampling.ALWAYS_ON) -> None:
        self._exporter = InMemorySpanExporter()
        provider = tracer_provider(sampler, Resource({}))
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()


UNSAMPLED = b"traceparent", f"00-{TRACE}-{SPAN}-00".encode()


@pytest.mark.parametrize(
    ("sampler", "headers", "route", "sampled"),
    [
        (ALL, [], "/embed", True),
        (NONE, [], "/embed", False),
        (ALL, [], "/livez", False),
        (NONE, [SAMPLED], "/embed", True),
        (NONE, [SAMPLED], "/livez", True),
        (ALL, [UNSAMPLED], "/embed", False),
        (NONE, [SAMPLED, SAMPLED], "/embed", False),  # two are none
    ],
)
def test_which_requests_have_spans(sampler: sampling.Sampler, headers: Headers, route: str, sampled: bool) -> None:
    """Probes are on /livez."""
    tracer = RequestTracer(Recorder(sampler).tracer, "http-7", frozenset({"/livez"}))
    scope = {"type": "http", "method": "POST", "scheme": "http", "path": route, "headers": headers}
    trace = copy_context().run(tracer.begin, scope, route, 1.0, called=bool(headers))
    assert (trace is not None) is sampled


@pytest.mark.parametrize("excess", [0, 1])
def test_a_long_tracestate_is_dropped(excess: int) -> None:
    tracer = RequestTracer(Recorder(NONE).tracer, "http-7", frozenset())
    first, second = b"a=" + b"x" * 254, b"b=" + b"y" * (STATE_MAX - 258 + excess)
    headers = [SAMPLED, (b"tracestate", first), (b"tracestate", second)]
    scope = {"type": "http", "method": "POST", "scheme": "http", "path": "/", "headers": headers}
    trace = copy_context().run(tracer.begin, scope, "/", 1.0)
    assert trace is not None
    assert trace.context[24:] == (b"" if excess else first + b"," + second)


# --- what waits for the collector ---


@pytest.mark.parametrize("head", ["200 OK", "200 OK\r\ntransfer-encoding: chunked", "302 Found\r\nlocation: /other"])
def test_a_response_that_never_ends_is_not_read_on(head: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sent = 0

        def respond() -> None:
            nonlocal sent
            connection, _ = listening.accept()
            with connection, contextlib.suppress(ConnectionError):
                while not connection.recv(65536).endswith(b"spans"):
                    pass
                connection.sendall(f"HTTP/1.1 {head}\r\n\r\n".encode())
                while True:
                    sent += connection.send(b"8000\r\n" + bytes(0x8000) + b"\r\n")

        collector = threading.Thread(target=respond)
        collector.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with span_export._BoundedSession() as session:
            assert session.post(url, b"spans").status_code == int(head[:3])
        collector.join()
    assert sent < 32 << 20  # what the kernel holds


# --- the middleware ---


def ask(app: ASGIApp, recorder: Recorder, *, sampled: bool = True, path: str = "/embed") -> int:
    """The status of a request through the middleware, in a new task."""
    metrics = HttpMetrics(["/embed", "other"], tasks=["/embed"])
    tracer = RequestTracer(recorder.tracer, "http-7", frozenset())
    observer = RequestObserver(
        labels_by_path(), ["/embed"], error_formats_by_path(), metrics, HeldBytes(1), tracer=tracer
    )
    server = RequestServer({}, app, observer, Keys(ServeConfig()), frozenset())
    headers = [SAMPLED if sampled else UNSAMPLED]
    scope = {"type": "http", "method": "POST", "scheme": "http", "path": path, "headers": headers}
    statuses: list[int] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    asyncio.run(server(scope, receive, send))
    return statuses[0]


async def breaks(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError(f"a bug that quotes {MARKER}")


def test_a_bug_is_an_error_with_the_exceptions_name() -> None:
    recorder = Recorder(NONE)
    assert ask(breaks, recorder) == 500
    (span,) = recorder.spans
    assert span.attributes is not None
    assert (span.attributes["http.response.status_code"], span.attributes["error.type"]) == (500, "RuntimeError")
    assert not span.status.is_ok
    assert MARKER not in span.to_json()
    assert span.context is not None
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (int(TRACE, 16), int(SPAN, 16))


@pytest.mark.parametrize("sampled", [True, False])
def test_log_lines_of_a_request_carry_its_trace(sampled: bool) -> None:
    """Also of one that is not sampled here: the caller's own log lines have the id."""
    lines: list[tuple[str, str]] = []

    class Format(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((logs._Json("http-0").format(record), logs._Text("http-0").format(record)))

    root, handler = logging.getLogger(), Format()
    root.addHandler(handler)
    try:
        assert ask(breaks, Recorder(NONE), sampled=sampled) == 500
        logging.getLogger(__name__).warning("of no request")
        logging.getLogger(__name__).warning("of an engine's request", extra={"trace_id": "ab" * 16})
    finally:
        root.removeHandler(handler)
    parsed = [json.loads(line) for line, _ in lines]
    assert [line.get("trace_id") for line in parsed] == [TRACE, None, "ab" * 16]
    first, second, third = (text for _, text in lines)
    assert first.endswith(f" trace_id={TRACE}")
    assert second.endswith("of no request")
    assert third.endswith(f" trace_id={'ab' * 16}")
