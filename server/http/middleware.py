"""What stands around every endpoint: request ids, counts, CORS, and the direct path that avoids the layers of ASGI.

The direct path serves requests whose body came with their head. The layers around the app add four coroutines, two
messages and a second write to each answer: half of what a short text costs the HTTP process.

All is pure ASGI: a BaseHTTPMiddleware would cost more than all other layers together.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
import traceback
from collections.abc import Collection, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from embert.server.config import ServeConfig
from embert.server.http.auth import Keys
from embert.server.http.errors import BadRequest, ErrorFormats, Reply, ServerError, error_body, error_reply, send_error
from embert.server.http.held_bytes import HeldBytes
from embert.server.http.protocol import BoundedCycle
from embert.server.http.request_head import PLAIN_KEY
from embert.server.observability.access_log import AccessLog
from embert.server.observability.api_metrics import ApiMetrics
from embert.server.observability.request_record import CLIENT_LEFT, INTERACTIVE, SCOPE_KEY, RequestRecord

if TYPE_CHECKING:
    from embert.server.observability.tracing.request_trace import RequestTrace, RequestTracer

__all__ = [
    "DirectRoutes",
    "Endpoint",
    "ObservedRequest",
    "RequestMetricsMiddleware",
    "ids_of",
    "with_cors",
]

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
# https://www.w3.org/TR/trace-context/#traceparent-header: version, trace id, parent id, flags
_TRACE_PARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")


class RequestMetricsMiddleware:
    """Counts and times every answer, those to preflights included, and answers 500 where the app raises."""

    def __init__(
        self,
        app: ASGIApp,
        labels: Mapping[str, str],
        tasks: Collection[str],
        error_formats: ErrorFormats,
        metrics: ApiMetrics,
        held: HeldBytes,
        access_log: AccessLog | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        """`labels` gives the metric label of every path that there can be; `tasks`: those that ask a model.

        `tracer`: None without traces.
        """
        self._app, self._labels, self._error_formats, self._metrics = app, labels, error_formats, metrics
        self._tasks, self._held, self._access_log, self._tracer = tasks, held, access_log, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        observed = self.begin(scope)
        record, trace = observed.record, observed.trace

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = status = message["status"]
                if status >= 400:
                    record.outcome = message.get("outcome", "")
                if trace is not None:
                    trace.reason = message.get("reason", "")
                message["headers"] = [*message["headers"], (b"x-request-id", record.id)]
            await send(message)

        if scope["method"] == "HEAD":  # a GET whose body uvicorn leaves out; it goes by its own scope
            scope = {**scope, "method": "GET"}
        try:
            await self._app(scope, receive, send_noting)
        except asyncio.CancelledError:
            record.status, record.outcome = CLIENT_LEFT, ""
        except Exception as error:  # noqa: BLE001 - a bug of ours: the client still gets an answer
            answer = observed.bug(error)
            if not record.status:
                await send_error(send_noting, answer, self._error_formats[scope["path"]])
        finally:
            self.end(observed)

    def begin(self, scope: Scope) -> ObservedRequest:
        """Note that a request begins, and put its record into its scope."""
        started = time.perf_counter()
        route = self._labels[scope["path"]]
        request_id, trace_id = ids_of(() if PLAIN_KEY in scope else scope["headers"])
        asks = scope["method"] == "POST" and route in self._tasks
        record = scope[SCOPE_KEY] = RequestRecord(route, request_id, trace_id, INTERACTIVE if asks else "")
        trace = None if self._tracer is None else self._tracer.begin(scope, route, started, called=bool(trace_id))
        if trace is not None:
            record.trace_id = trace.trace_id.hex().encode()  # exemplars and the access log name the spans' trace
        self._metrics.requests_in_flight += 1
        return ObservedRequest(scope, record, trace, started)

    def end(self, observed: ObservedRequest) -> None:
        """Note that a request has ended, with the status in its record."""
        self._metrics.requests_in_flight -= 1
        ended = time.perf_counter()
        record, seconds = observed.record, ended - observed.started
        self._held.requests -= record.held
        self._metrics.observe(record, seconds)
        if self._access_log is not None:
            self._access_log.note(record, seconds, observed.scope.get("client"))
        trace = observed.trace
        if trace is not None:
            trace.end(record, ended)


class ObservedRequest(NamedTuple):
    """A request in progress."""

    scope: Scope
    record: RequestRecord
    trace: RequestTrace | None
    started: float

    def bug(self, error: Exception) -> ServerError:
        """Log what the app has raised; the answer to it."""
        _log_bug(error, self.record.id, self.record.route)
        if self.trace is not None:
            self.trace.exception = type(error).__name__
        return ServerError("internal error; the log has more")


def ids_of(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """The id of a request, generated if it has no valid one, and the id of its trace; b"": none."""
    request_id = trace_id = b""
    for name, value in headers:
        if name == b"x-request-id":
            request_id = request_id or value
        elif name == b"traceparent" and (parent := _TRACE_PARENT.fullmatch(value)):
            trace_id = parent[1]
    if not request_id or not _REQUEST_ID.fullmatch(request_id):
        request_id = b"%032x" % random.getrandbits(128)
    return request_id, trace_id


def _log_bug(error: Exception, request_id: bytes, route: str) -> None:
    """Log everything but the exception's own message, which may quote a text."""
    log.error(
        "request %s on %s failed: %s\nTraceback (most recent call last):\n%s",
        request_id.decode(),
        route,
        type(error).__name__,
        "".join(traceback.format_tb(error.__traceback__)),
    )


class Endpoint(Protocol):
    """What answers the requests of a route."""

    async def reply(self, scope: Scope, receive: Receive | None, body: bytes) -> Reply:
        """The answer to a request with this body; `receive` is None. It is cancelled when the client leaves."""
        ...


class DirectRoutes:
    """POST routes that need none of the app's layers but those that count requests and check keys."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        observer: RequestMetricsMiddleware,
        keys: Keys,
        error_formats: ErrorFormats,
    ) -> None:
        """`endpoints` by path."""
        self._endpoints, self._observer, self._keys, self._error_formats = endpoints, observer, keys, error_formats

    def __call__(self, cycle: BoundedCycle) -> Coroutine[None, None, None] | None:
        """What answers a complete request; None for the app's."""
        scope = cycle.scope
        endpoint = self._endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        return None if endpoint is None else self._answer(cycle, endpoint)

    async def _answer(self, cycle: BoundedCycle, endpoint: Endpoint) -> None:
        scope: Scope = cycle.scope  # type: ignore[assignment]
        observed = self._observer.begin(scope)
        record = observed.record
        try:
            try:
                if self._keys.digests:
                    record.key = self._keys.check(scope)
                reply = await endpoint.reply(scope, None, cycle.take_body())
            except ServerError as error:
                reply = error_reply(error, self._error_formats[scope["path"]])
            except Exception as error:  # noqa: BLE001 - a bug of ours: the client still gets an answer
                reply = error_reply(observed.bug(error), self._error_formats[scope["path"]])
            record.status, record.outcome = reply.status, reply.outcome
            if observed.trace is not None:
                observed.trace.reason = reply.reason
            cycle.reply(reply, record.id)
        except asyncio.CancelledError:
            record.status, record.outcome = CLIENT_LEFT, ""
        finally:
            self._observer.end(observed)
            cycle.end_direct()


def with_cors(app: ASGIApp, config: ServeConfig, error_formats: ErrorFormats) -> ASGIApp:
    """Let browsers of the allowed origins in. Returns `app` itself where no origin is allowed."""
    if not config.cors_allow_origin:
        return app
    return _Cors(app, config.cors_allow_origin, error_formats)


class _Cors(CORSMiddleware):
    """Answers a refused preflight with an error in the route's form."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...], error_formats: ErrorFormats) -> None:
        super().__init__(
            app,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # includes `authorization`, so that browsers can send a key
            expose_headers=["*"],
        )
        self._error_formats = error_formats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            headers = Headers(scope=scope)
            if "origin" in headers and "access-control-request-method" in headers:
                await self._answer(scope["path"], headers)(scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    def _answer(self, path: str, headers: Headers) -> Response:
        answer = self.preflight_response(request_headers=headers)
        if answer.status_code != 400:
            return answer
        what = bytes(answer.body).decode().removeprefix("Disallowed CORS ")
        why = f"the origin's preflight asks for what is not allowed (--cors-allow-origin): {what}"
        answer_headers = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        return Response(
            error_body(BadRequest(why), self._error_formats[path]), 400, answer_headers, media_type="application/json"
        )
