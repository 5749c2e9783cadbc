"""The direct path of a request: from the protocol to its task's endpoint and back, without ASGI messages and layers.

It serves requests whose body came with their head. The layers around the app add four coroutines, two messages and a
second write to each answer: half of what a short text costs the HTTP process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Protocol

from starlette.types import Receive, Scope

from embert.server.http.auth import Keys
from embert.server.http.errors import ErrorFormats, Reply, ServerError, error_reply
from embert.server.http.request_cycle import BoundedCycle
from embert.server.http.request_metrics import RequestMetricsMiddleware
from embert.server.observability.request_record import CLIENT_LEFT

__all__ = ["DirectRoutes", "Endpoint"]


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
                if self._keys.any:
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
