"""One request on its way: its options, its body, and the steps that handlers of all dialects share."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from starlette.types import Receive, Scope

from embert.engine import Encoded, Task
from embert.engine.tokenization.pairs import NO_PAIR_LIMITS, PairLimits
from embert.server.api.engines.pending import Answer
from embert.server.api.input.large_bodies import LARGE, SplitIds, check_values, split_ids
from embert.server.api.input.request_body import RequestBody, TextOrIds, describe_name, parse
from embert.server.api.input.request_options import read_request_options
from embert.server.api.input.text_pairs import TextPairs
from embert.server.api.latency_breakdown import LatencyBreakdown
from embert.server.api.serialization import raw_rows
from embert.server.api.service import Service
from embert.server.config import option_name
from embert.server.http.accept import prefers
from embert.server.http.errors import UnsupportedEncoding

__all__ = ["JSON", "Handler", "RequestContext"]

RequestT = TypeVar("RequestT", bound=RequestBody)

JSON, OCTETS = b"application/json", b"application/octet-stream"


class RequestContext:
    """What handlers need of a request and of the service."""

    __slots__ = ("_body", "breakdown", "headers", "options", "receive", "scope", "service")

    def __init__(self, service: Service, scope: Scope, receive: Receive) -> None:
        """Raises Invalid for request options that cannot be read."""
        self.service, self.scope, self.receive = service, scope, receive
        self.breakdown = LatencyBreakdown()
        self.options = read_request_options(scope["headers"], time.monotonic(), service.config.request_timeout)
        self._body = b""
        self.headers: list[tuple[bytes, bytes]] = []  # of the answer

    async def read_body(self) -> None:
        """Raises ServerError for a body that is too large, too slow or compressed."""
        headers = self.scope["headers"]
        _check_encoding(headers)
        self._body = await self.service.bodies.read(headers, self.receive, self.options.deadline)

    async def parse(self, schema: type[RequestT]) -> RequestT:
        """The request in the body, once; the body is dropped."""
        body, self._body = self._body, b""
        if len(body) <= LARGE:
            return parse(schema, body)
        service = self.service
        split: list[SplitIds | None] = []
        request: list[RequestT] = []
        steps = (
            lambda: check_values(
                body,
                getattr(service.config, schema.text_limit),
                service.most_ids,
                option=option_name(schema.text_limit),
                strings_per_text=schema.strings_per_text,
            ),
            lambda: split.append(split_ids(body)),
            lambda: request.append(parse(schema, body, split[0])),
        )
        await service.parse_steps.run(len(body), steps, lambda: service.admission.check_time(self.options))
        return request[0]

    async def tokenize(
        self,
        given: TextOrIds,
        *,
        param: str,
        truncate: bool | None,
        direction: Any = "right",
        prompt_name: str | None = None,
    ) -> Encoded:
        """Texts or ids to packed ids; see Service.tokenize."""
        encoded = await self.service.tokenize(
            given,
            self.receive,
            self.breakdown,
            self.options,
            param=param,
            truncate=truncate,
            direction=direction,
            prompt_name=prompt_name,
        )
        return self._noting_truncated(encoded)

    async def tokenize_pairs(
        self,
        texts: TextPairs,
        *,
        params: tuple[str, str],
        truncate: bool | None,
        direction: Any = "right",
        limits: PairLimits = NO_PAIR_LIMITS,
    ) -> Encoded:
        """Pairs of texts to packed ids; see Service.tokenize_pairs."""
        encoded = await self.service.tokenize_pairs(
            texts,
            self.receive,
            self.breakdown,
            self.options,
            params=params,
            truncate=truncate,
            direction=direction,
            limits=limits,
        )
        return self._noting_truncated(encoded)

    def _noting_truncated(self, encoded: Encoded) -> Encoded:
        if encoded.truncated:
            self.headers.append((b"x-truncated-texts", b"%d" % encoded.truncated))
        return encoded

    async def run(
        self, encoded: Encoded, tasks: Task = Task.EMBED, *, dimensions: int = 0, normalize: bool = True
    ) -> Answer:
        """The rows of the tasks, through an engine; see Router.encode."""
        router = self.service.router
        answer = await router.encode(
            encoded, self.receive, self.options, tasks=tasks, dimensions=dimensions, normalize=normalize
        )
        self.breakdown.note(answer)
        return answer

    @property
    def wants_raw(self) -> bool:
        """Whether the client asks for raw rows instead of JSON."""
        return prefers(OCTETS, JSON, [value for name, value in self.scope["headers"] if name == b"accept"])

    def raw(self, vectors: npt.NDArray[np.float32]) -> tuple[bytes, bytes]:
        """The answer with float32 [n, d] as raw rows."""
        self.headers.append((b"x-embedding-shape", b"%d,%d" % vectors.shape))
        return OCTETS, raw_rows(vectors)


Handler = Callable[[RequestContext], Awaitable[tuple[bytes, bytes]]]  # → content type, body


def _check_encoding(headers: list[tuple[bytes, bytes]]) -> None:
    for name, value in headers:
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            given = describe_name(value.decode("latin-1"))
            raise UnsupportedEncoding(f"`Content-Encoding` must be `identity`, that is not compressed; it is {given}")
