"""A receiver of traces over OTLP/HTTP, built from the protocol's own package."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that left, as those do that a test lets wait; raise what is wrong with a message."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as it came over the wire. Ids are hexadecimal, times are in Unix nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str  # empty: none
    state: str
    is_server: bool
    started: int
    ended: int
    attributes: dict[str, Any]
    links: list[tuple[str, str]]  # trace id, span id
    failed: bool
    message: str  # of its status
    resource: dict[str, Any]


class OtlpReceiver:
    """Takes spans on a free port of this machine, in threads. A context manager."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[ReceivedSpan] = []
        self.bodies: list[bytes] = []
        self.responds = threading.Event()  # while it is not set, requests wait for their responses
        self.responds.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.responds.wait()
                receiver._take(self.path, body)
                response = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(response)))
                self.end_headers()
                self.wfile.write(response)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> OtlpReceiver:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.responds.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._lock:
            return list(self._spans)

    def _take(self, path: str, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        if path != "/v1/traces":
            raise ValueError(f"traces are not sent to {path}")
        found = [
            (resource, span)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self.bodies.append(body)
            self._spans += [_received(span, _attributes(resource.resource.attributes)) for resource, span in found]


def _received(span: Span, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.trace_state,
        span.kind == Span.SPAN_KIND_SERVER,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _attributes(span.attributes),
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        span.status.code == 2,
        span.status.message,
        resource,
    )


def _attributes(pairs: Sequence[Any]) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
