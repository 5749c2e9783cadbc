"""Plain ASGI around a task's handler: options and body in, answer or error out. Half the cost of a FastAPI endpoint."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from starlette.types import Receive, Scope, Send

from embert.server.api.input.large_bodies import LARGE, SplitIds, check_values, split_ids
from embert.server.api.input.request_body import RequestBody, describe_name, parse
from embert.server.api.input.request_options import read_request_options
from embert.server.api.latency_breakdown import LatencyBreakdown
from embert.server.api.serialization import raw_rows
from embert.server.api.service import Service
from embert.server.http.accept import prefers
from embert.server.http.errors import Dialect, ServerError, UnsupportedEncoding, send_error

__all__ = ["JSON", "Handler", "RequestContext", "TaskEndpoint"]

RequestT = TypeVar("RequestT", bound=RequestBody)

JSON, OCTETS = b"application/json", b"application/octet-stream"


class RequestContext:
    """One request on its way: what handlers need of it."""

    __slots__ = ("_body", "breakdown", "headers", "options", "receive", "scope")

    def __init__(self, scope: Scope, receive: Receive, timeout_s: float) -> None:
        """`timeout_s` is --request-timeout. Raises Invalid for request options that cannot be read."""
        self.scope, self.receive = scope, receive
        self.breakdown = LatencyBreakdown()
        self.options = read_request_options(scope["headers"], time.monotonic(), timeout_s)
        self._body = b""
        self.headers: list[tuple[bytes, bytes]] = []  # of the answer

    async def read_body(self, service: Service) -> None:
        """Raises ServerError for a body that is too large, too slow or compressed."""
        headers = self.scope["headers"]
        _check_encoding(headers)
        self._body = await service.bodies.read(headers, self.receive, self.options.deadline)

    async def parse(self, schema: type[RequestT], service: Service) -> RequestT:
        """The request in the body, once; the body is dropped."""
        body, self._body = self._body, b""
        if len(body) <= LARGE:
            return parse(schema, body)
        split: list[SplitIds | None] = []
        request: list[RequestT] = []
        steps = (
            lambda: check_values(body, service.config.max_client_batch_size, service.most_ids),
            lambda: split.append(split_ids(body)),
            lambda: request.append(parse(schema, body, split[0])),
        )
        await service.parse_steps.run(len(body), steps, lambda: service.admission.check_time(self.options))
        return request[0]

    @property
    def wants_raw(self) -> bool:
        """Whether the client asks for raw rows instead of JSON."""
        return prefers(OCTETS, JSON, [value for name, value in self.scope["headers"] if name == b"accept"])

    def raw(self, vectors: npt.NDArray[np.float32]) -> tuple[bytes, bytes]:
        """The answer with float32 [n, d] as raw rows."""
        self.headers.append((b"x-embedding-shape", b"%d,%d" % vectors.shape))
        return OCTETS, raw_rows(vectors)


Handler = Callable[[Service, RequestContext], Awaitable[tuple[bytes, bytes]]]  # → content type, body


class TaskEndpoint:
    """The ASGI app of one task's route."""

    def __init__(self, service: Service, handler: Handler, dialect: Dialect) -> None:
        self._service, self._handler, self._dialect = service, handler, dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        service = self._service
        try:
            context = RequestContext(scope, receive, service.config.request_timeout)
            await context.read_body(service)
            content_type, body = await self._handler(service, context)
        except ServerError as error:
            if error.reject_reason is not None:
                service.metrics.rejected[error.reject_reason].inc()
            await send_error(send, error, self._dialect)
            return
        breakdown = context.breakdown
        if breakdown.answered is not None:
            service.metrics.response_encode_duration.observe(time.perf_counter() - breakdown.answered)
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *context.headers]
        headers += breakdown.headers(service.compute_type)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _check_encoding(headers: list[tuple[bytes, bytes]]) -> None:
    for name, value in headers:
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            given = describe_name(value.decode("latin-1"))
            raise UnsupportedEncoding(f"`Content-Encoding` must be `identity`, that is not compressed; it is {given}")
