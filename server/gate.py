"""The outermost layer of the app: request ids, keys, counting.

Pure ASGI: a BaseHTTPMiddleware would cost more than all the rest.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.config import ServeConfig, read_api_keys
from server.embeddings import send_error
from server.errors import ServerError, Unauthorized
from server.metrics import ApiMetrics

__all__ = ["OPEN_PATHS", "Gate", "Keys", "speaks_openai"]

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ping", "/livez", "/readyz"})  # probes carry no keys
CLIENT_LEFT = 499  # nginx's number, for the counter only
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def speaks_openai(path: str) -> bool:
    """Whether errors on this path are OpenAI's."""
    return path.startswith("/v1/") or path == "/embeddings"


class Keys:
    """The accepted API keys; as digests, so that comparing takes the same time for every key given."""

    def __init__(self, config: ServeConfig) -> None:
        """Raises ConfigError when --api-key-file cannot be used."""
        self._digests = [self._digest(key.encode()) for key in read_api_keys(config)]

    @staticmethod
    def _digest(key: bytes) -> bytes:
        return hashlib.sha256(key).digest()

    def check(self, scope: Scope) -> None:
        """Raise Unauthorized unless the request carries one of the keys, or none is wanted."""
        if not self._digests or scope["path"] in OPEN_PATHS:
            return
        if scope["path"] == "/" and scope["method"] == "GET":  # the page, which asks for a key itself
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = self._digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, always
        if scheme.lower() != b"bearer" or not any(matches):
            wrong = "is wrong" if given else "is missing"
            raise Unauthorized(f"the API key {wrong}; send it as `Authorization: Bearer KEY`")


class Gate:
    """Wraps the whole app."""

    def __init__(
        self, app: ASGIApp, hot: Mapping[str, ASGIApp], routes: frozenset[str], keys: Keys, metrics: ApiMetrics
    ) -> None:
        """`hot` are the apps of POST routes that go past FastAPI's own layers; `routes` the values of the label."""
        self._app, self._hot, self._routes, self._keys, self._metrics = app, hot, routes, keys, metrics

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
            self._keys.check(scope)
            app = self._hot.get(path, self._app) if scope["method"] == "POST" else self._app
            await app(scope, receive, send_noting)
        except ServerError as error:
            await send_error(send_noting, error, openai=speaks_openai(path))
        except asyncio.CancelledError:
            status = CLIENT_LEFT
        except Exception:  # a mistake of ours: the client still gets an answer, and the log the whole story
            log.exception("request %s on %s failed", request_id.decode(), route)
            if not status:
                await send_error(
                    send_noting, ServerError("internal error; the log has more"), openai=speaks_openai(path)
                )
        finally:
            metrics.requests_in_flight -= 1
            metrics.count(route, status)
            metrics.request_duration[route].observe(time.perf_counter() - started)
