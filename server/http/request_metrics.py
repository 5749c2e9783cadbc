"""The outermost layer of the app: every request gets an id, an answer, and is counted.

Pure ASGI: a BaseHTTPMiddleware would cost more than everything else together.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
import traceback
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from embert.server.http.errors import Dialects, ServerError, send_error
from embert.server.observability.metrics import ApiMetrics
from embert.server.observability.tracing.request_trace import RequestTracer

__all__ = ["RequestMetricsMiddleware"]

log = logging.getLogger(__name__)

CLIENT_LEFT = 499  # nginx's number, for the counter only
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestMetricsMiddleware:
    """Counts and times every answer, those to preflights included, and answers 500 where the app raises."""

    def __init__(
        self,
        app: ASGIApp,
        labels: Mapping[str, str],
        dialects: Dialects,
        metrics: ApiMetrics,
        tracer: RequestTracer | None = None,
    ) -> None:
        """`labels` gives the metric label of every path that there can be. `tracer`: None without traces."""
        self._app, self._labels, self._dialects, self._metrics = app, labels, dialects, metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        route = self._labels[scope["path"]]
        request_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = os.urandom(16).hex().encode()
        status = 0
        trace = None if self._tracer is None else self._tracer.begin(scope, route, started)

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if trace is not None:
                    trace.reason = message.get("reason", "")
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        if scope["method"] == "HEAD":  # a GET whose body uvicorn leaves out; it goes by its own scope
            scope = {**scope, "method": "GET"}
        metrics = self._metrics
        metrics.requests_in_flight += 1
        try:
            await self._app(scope, receive, send_noting)
        except asyncio.CancelledError:
            status = CLIENT_LEFT
        except Exception as error:  # noqa: BLE001 - a bug of ours: the client still gets an answer
            _log_bug(error, request_id, route)
            if trace is not None:
                trace.exception = type(error).__name__
            if not status:
                answer = ServerError("internal error; the log has more")
                await send_error(send_noting, answer, self._dialects[scope["path"]])
        finally:
            metrics.requests_in_flight -= 1
            metrics.count(route, status)
            ended = time.perf_counter()
            metrics.request_duration[route].observe(ended - started)
            if trace is not None:
                trace.end(status, request_id, ended)


def _log_bug(error: Exception, request_id: bytes, route: str) -> None:
    """Log everything but the exception's own message, which may quote a text."""
    log.error(
        "request %s on %s failed: %s\nTraceback (most recent call last):\n%s",
        request_id.decode(),
        route,
        type(error).__name__,
        "".join(traceback.format_tb(error.__traceback__)),
    )
