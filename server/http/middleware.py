"""The outermost layers of the app: request ids and counting (Gate), browsers (CORS), keys and dispatch (Guard).

Pure ASGI: a BaseHTTPMiddleware would cost more than all the rest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
import traceback
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from embert.server.config import ServeConfig
from embert.server.http.auth import KEYLESS, Keys
from embert.server.http.errors import BadRequest, ServerError, Unavailable, error_body, send_error, speaks_openai
from embert.server.observability.metrics import ApiMetrics

__all__ = ["Gate", "Guard", "with_cors"]

log = logging.getLogger(__name__)

CLIENT_LEFT = 499  # nginx's number, for the counter only
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def with_cors(app: ASGIApp, config: ServeConfig) -> ASGIApp:
    """Let browsers of the allowed origins in; nothing to do where there are none."""
    if not config.cors_allow_origin:
        return app
    return _Cors(
        app,
        allow_origins=list(config.cors_allow_origin),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # `authorization` among them, so that browsers can send a key
        expose_headers=["*"],
    )


class _Cors(CORSMiddleware):
    """A preflight that is refused is answered like any other request that is."""

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
        kept = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        body = error_body(BadRequest(why), openai=speaks_openai(path))
        return Response(body, 400, kept, media_type="application/json")


class Gate:
    """Gives every request its id and counts every answer, those to preflights included."""

    def __init__(self, app: ASGIApp, routes: frozenset[str], metrics: ApiMetrics) -> None:
        """`routes` are the values of the label."""
        self._app, self._routes, self._metrics = app, routes, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        path: str = scope["path"]
        route = path if path in self._routes else "/v1/models/{id}" if path.startswith("/v1/models/") else "other"
        request_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = os.urandom(16).hex().encode()
        status = 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        if scope["method"] == "HEAD":  # a GET whose body uvicorn, which keeps its own scope, leaves out
            scope = {**scope, "method": "GET"}
        metrics = self._metrics
        metrics.requests_in_flight += 1
        try:
            await self._app(scope, receive, send_noting)
        except asyncio.CancelledError:
            status = CLIENT_LEFT
        except Exception as error:  # noqa: BLE001 - a mistake of ours: the client still gets an answer
            frames = "".join(traceback.format_tb(error.__traceback__))
            log.error(  # noqa: TRY400 - the whole story but for the exception's own words, which may quote a text
                "request %s on %s failed: %s\nTraceback (most recent call last):\n%s",
                request_id.decode(),
                route,
                type(error).__name__,
                frames,
            )
            if not status:
                await send_error(
                    send_noting, ServerError("internal error; the log has more"), openai=speaks_openai(path)
                )
        finally:
            metrics.requests_in_flight -= 1
            metrics.count(route, status)
            metrics.request_duration[route].observe(time.perf_counter() - started)


class Guard:
    """Checks the key, and hands the request to its route."""

    def __init__(self, app: ASGIApp, hot: Mapping[str, ASGIApp], keys: Keys, metrics: ApiMetrics) -> None:
        """`hot` are the apps of POST routes that go past FastAPI's own layers."""
        self._app, self._hot, self._keys, self._metrics = app, hot, keys, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        path: str = scope["path"]
        try:
            self._keys.check(scope)
            if scope.get("state"):  # of a connection: see http_protocol
                self._refuse_connection(scope)
            app = self._hot.get(path, self._app) if scope["method"] == "POST" else self._app
            await app(scope, receive, send)
        except ServerError as error:
            await send_error(send, error, openai=speaks_openai(path))

    def _refuse_connection(self, scope: Scope) -> None:
        limit = scope["state"].get("too_many_connections")
        if limit is None or scope["path"] in KEYLESS["probes"]:
            return
        self._metrics.rejected["connections"].inc()
        raise Unavailable(
            f"this server has more than {limit} connections, the limit (--max-connections)",
            retry_after_s=1,
            reason="connections",
        )
