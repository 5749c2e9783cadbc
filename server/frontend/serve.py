"""The way of a request through an HTTP process.

`RequestServer.serve` serves every request of a task, in this order: record and trace, key, connection limit, body
within the memory budget, model, handler, errors, metrics and access log. The protocol calls it for a request that is
complete; the ASGI application calls it for the others, whose body it reads. Requests of operations, such as /metrics
and /docs, take the same first and last steps, with FastAPI in place of a handler.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from embert.engine.errors import InputError
from embert.server.http.auth import Keys
from embert.server.http.errors import ErrorFormats, ServerError, Unavailable
from embert.server.http.held_bytes import HeldBytes
from embert.server.http.request_head import PLAIN_KEY
from embert.server.http.response import Response, error_response, send_error, send_response
from embert.server.observability.access_log import AccessLog
from embert.server.observability.http_metrics import HttpMetrics
from embert.server.observability.request_record import CLIENT_LEFT, INTERACTIVE, SCOPE_KEY, RequestRecord
from embert.server.protocols.request_context import Handler, RequestContext
from embert.server.registry.model_registry import ModelSelector
from embert.server.registry.tokenizing import as_server_error

if TYPE_CHECKING:
    from embert.server.observability.tracing.request_trace import RequestTracer

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
# https://www.w3.org/TR/trace-context/#traceparent-header: version, trace id, parent id, flags
_TRACE_PARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")


class TaskEndpoint(NamedTuple):
    """A task at one path."""

    selector: ModelSelector
    handler: Handler
    can: bool  # a model has the task
    model: str  # served name of the model, for metrics; empty if it depends on the body


class RequestServer:
    """Serves the requests of one HTTP process."""

    def __init__(
        self,
        tasks: Mapping[str, TaskEndpoint],
        operations: ASGIApp,
        observer: RequestObserver,
        keys: Keys,
        probes: frozenset[str],
        cors: Callable[[ASGIApp], ASGIApp] | None = None,
    ) -> None:
        """`tasks` by path, in which `{name}` stands for any text. `operations` serves every other request.

        `probes` are the paths that stay open when there are too many connections or too little memory. `cors` wraps an
        application where browsers of other origins are allowed.
        """
        self._tasks = tasks
        self._patterns = [
            (re.compile(re.escape(path).replace(r"\{name\}", "(?P<name>.*)"), re.DOTALL), task)
            for path, task in tasks.items()
            if "{name}" in path
        ]
        self._operations, self._observer, self._keys, self._probes = operations, observer, keys, probes
        self._has_cors = cors is not None
        self._task_app = self._send_task if cors is None else cors(self._send_task)
        self._operation_app = self._send_operation if cors is None else cors(self._send_operation)

    def serves(self, scope: Scope) -> bool:
        """True if `serve` gives the whole response to this request, without ASGI."""
        return scope["method"] == "POST" and not self._has_cors and scope["path"] in self._tasks

    async def serve(self, scope: Scope, receive: Receive | None, body: bytes = b"") -> Response:
        """Serves one request of a task.

        `receive` reads the body. None: the body is `body`, and this coroutine is cancelled when the client leaves.
        Raises CancelledError when the client has left.
        """
        observer = self._observer
        record, context = observer.begin(scope), None
        try:
            if self._keys.digests or ("state" in scope and scope["state"]):  # noqa: RUF019 - `get` would be a call
                self._check(scope, record)
            path: str = scope["path"]
            task = self._tasks[path] if path in self._tasks else self._find(scope)
            selector, handler, can, record.model = task
            if not can:
                selector.default.check(selector.capability)
            context = RequestContext(selector, scope, receive, record)
            record.parts, record.priority = context.breakdown, context.options.priority
            if receive is None:
                context.take_body(body)
            else:
                await context.read_body()
            content_type, payload = await handler(context)
            context.breakdown.note_encoded()
            if record.trace is not None and context.breakdown.received is not None:
                record.trace.stage("encode", context.breakdown.received, time.perf_counter())
            response = Response(200, context.response_headers(content_type, len(payload)), payload)
        except (ServerError, InputError) as mistake:
            # The traceback holds frames with the texts, and one of the frames this exception: a cycle that would keep
            # them in memory until a garbage collection, which is rare here.
            mistake.__traceback__ = None
            error = as_server_error(mistake)
            if context is not None and context.names:
                error.rename(context.names)
            response = observer.refuse(record, scope, error)
        except asyncio.CancelledError:
            record.status = CLIENT_LEFT
            raise
        except Exception as error:  # noqa: BLE001 - a bug of ours: the client still gets a response
            response = observer.fail(record, scope, error)
        else:
            record.status = 200
        finally:
            observer.end(record, scope)
        headers = response.headers
        headers += ((b"x-request-id", record.id),)  # a call of `append` costs more
        return response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request over ASGI."""
        if scope["type"] != "http":
            await self._operations(scope, receive, send)
        elif scope["method"] == "POST" and self.has_task(scope["path"]):
            await self._task_app(scope, receive, send)
        else:
            await self._serve_operation(scope, receive, send)

    def has_task(self, path: str) -> bool:
        """True if there is a task at this path."""
        return path in self._tasks or any(pattern.fullmatch(path) for pattern, _ in self._patterns)

    async def _send_task(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self.serve(scope, receive)
        except asyncio.CancelledError:
            return  # the client has left
        await send_response(send, response)

    async def _serve_operation(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = scope[SCOPE_KEY] = self._observer.begin(scope)

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = status = message["status"]
                if status >= 400:
                    record.outcome = message.get("outcome", "")
                if record.trace is not None:
                    record.trace.reason = message.get("reason", "")
                message["headers"] = [*message["headers"], (b"x-request-id", record.id)]
            await send(message)

        if scope["method"] == "HEAD":  # a GET whose body uvicorn leaves out; it goes by its own scope
            scope = {**scope, "method": "GET"}
        try:
            await self._operation_app(scope, receive, send_noting)
        except asyncio.CancelledError:
            record.status, record.outcome = CLIENT_LEFT, ""
        except Exception as error:  # noqa: BLE001 - a bug of ours: the client still gets a response
            started = record.status
            response = self._observer.fail(record, scope, error)
            if started:
                record.status = started
            else:
                await send_response(send_noting, response)
        finally:
            self._observer.end(record, scope)

    async def _send_operation(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope, scope[SCOPE_KEY])
            held = self._observer.held
            if held.is_full and scope["path"] not in self._probes:  # responses are not counted before they are written
                raise held.refusal("the response", 0)
        except ServerError as error:
            self._observer.count_rejected(error)
            await send_error(send, error, self._observer.error_formats[scope["path"]])
            return
        await self._operations(scope, receive, send)

    def _check(self, scope: Scope, record: RequestRecord) -> None:
        """Raises Unauthorized without a valid key, and Unavailable on a connection above the limit."""
        if self._keys.digests:
            record.key = self._keys.check(scope)
        if scope.get("state"):  # set by the protocol for this connection
            limit = scope["state"].get("too_many_connections")
            if limit is not None and scope["path"] not in self._probes:
                raise Unavailable(
                    "this server has too many connections",
                    limit=limit,
                    option="--max-connections",
                    retry_after_s=1,
                    reject_reason="connections",
                )

    def _find(self, scope: Scope) -> TaskEndpoint:
        """The task at a path with the name of a model in it, which may be empty."""
        matches = ((pattern.fullmatch(scope["path"]), task) for pattern, task in self._patterns)
        match, task = next((match, task) for match, task in matches if match)
        scope["path_params"] = match.groupdict()
        return task


class RequestObserver:
    """Keeps the records of requests: metrics, access log and traces."""

    def __init__(
        self,
        labels: Mapping[str, str],
        tasks: Collection[str],
        error_formats: ErrorFormats,
        metrics: HttpMetrics,
        held: HeldBytes,
        access_log: AccessLog | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        """`labels` has the metric label of every possible path; `tasks` are the labels of tasks."""
        self.error_formats, self.held = error_formats, held
        self._labels, self._tasks, self._metrics = labels, tasks, metrics
        self._access_log, self._tracer = access_log, tracer

    def begin(self, scope: Scope) -> RequestRecord:
        started = time.perf_counter()
        route = self._labels[scope["path"]]
        request_id, trace_id = read_ids(() if PLAIN_KEY in scope else scope["headers"])
        is_task = scope["method"] == "POST" and route in self._tasks
        record = RequestRecord(route, request_id, trace_id, INTERACTIVE if is_task else "")
        record.started = started
        if self._tracer is not None:
            record.trace = trace = self._tracer.begin(scope, route, started, called=bool(trace_id))
            if trace is not None:
                record.trace_id = trace.trace_id.hex().encode()  # exemplars and the access log name the spans' trace
        self._metrics.requests_in_flight += 1
        return record

    def end(self, record: RequestRecord, scope: Scope) -> None:
        """Ends the record of a request. Its status is in the record."""
        self._metrics.requests_in_flight -= 1
        ended = time.perf_counter()
        seconds = ended - record.started
        self.held.requests -= record.held
        self._metrics.observe(record, seconds)
        if self._access_log is not None:
            self._access_log.note(record, seconds, scope.get("client"))
        if record.trace is not None:
            record.trace.end(record, ended)
            record.trace = None  # exemplars keep the record

    def count_rejected(self, error: ServerError) -> None:
        if error.reject_reason is not None:
            self._metrics.rejected[error.reject_reason].inc()

    def refuse(self, record: RequestRecord, scope: Scope, error: ServerError) -> Response:
        """Counts a refused request, and renders the error in the form of its route."""
        self.count_rejected(error)
        response = error_response(error, self.error_formats[scope["path"]])
        record.status, record.outcome = response.status, response.outcome
        if record.trace is not None:
            record.trace.reason = response.reason
        return response

    def fail(self, record: RequestRecord, scope: Scope, error: Exception) -> Response:
        """Logs an unexpected exception without its message, which may quote a text, and renders a 500 response."""
        log.error(
            "request %s on %s failed: %s\nTraceback (most recent call last):\n%s",
            record.id.decode(),
            record.route,
            type(error).__name__,
            "".join(traceback.format_tb(error.__traceback__)),
        )
        if record.trace is not None:
            record.trace.exception = type(error).__name__
        return self.refuse(record, scope, ServerError("internal error; the log has more"))


def read_ids(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """The id of a request, generated if it has no valid one, and the id of its trace, or b""."""
    request_id = trace_id = b""
    for name, value in headers:
        if name == b"x-request-id":
            request_id = request_id or value
        elif name == b"traceparent" and (parent := _TRACE_PARENT.fullmatch(value)):
            trace_id = parent[1]
    if not request_id or not _REQUEST_ID.fullmatch(request_id):
        request_id = b"%032x" % random.getrandbits(128)
    return request_id, trace_id
