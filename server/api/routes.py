"""The routes that do the work. Plain ASGI inside the FastAPI app: half the cost of a FastAPI endpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import numpy as np
import orjson
from pydantic import BaseModel
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from embert.engine.tokenizer import TokenInfo, Turns
from embert.server.api.input.request_options import read_request_options
from embert.server.api.large_bodies import LARGE, SplitIds, check_values, split_ids
from embert.server.api.schemas import (
    DecodeRequest,
    EmbedAllRequest,
    EmbeddingsRequest,
    EmbedRequest,
    SimilarityParameters,
    SimilarityRequest,
    TokenizeRequest,
    describe_name,
    parse,
)
from embert.server.api.serialization import floats_json, nested_floats_json, openai_json, raw_rows
from embert.server.api.service import Service, Timing
from embert.server.http.accept import prefers
from embert.server.http.errors import EmptyInput, PayloadTooLarge, ServerError, UnsupportedEncoding, send_error

__all__ = ["HOT_ROUTES", "hot_routes"]

log = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=BaseModel)

JSON, OCTETS = b"application/json", b"application/octet-stream"


class _Call:
    """One request on its way: what handlers need of it."""

    __slots__ = ("_body", "headers", "options", "receive", "scope", "timing")

    def __init__(self, scope: Scope, receive: Receive, timeout_s: float) -> None:
        self.scope, self.receive = scope, receive
        self.timing = Timing()
        self.options = read_request_options(scope["headers"], time.monotonic(), timeout_s)
        self._body = b""
        self.headers: list[tuple[bytes, bytes]] = []

    async def read(self, schema: type[RequestT], service: Service) -> RequestT:
        """The request in the body, which is not held any longer."""
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
        await service.long_steps.take(len(body), steps, lambda: service.admission.check_time(self.options))
        return request[0]

    async def read_body(self, service: Service) -> None:
        """Raises ServerError for one that is too large, too slow or compressed."""
        headers = self.scope["headers"]
        _check_encoding(headers)
        self._body = await service.bodies.read(headers, self.receive, self.options.deadline)

    @property
    def wants_raw(self) -> bool:
        return prefers(OCTETS, JSON, [value for name, value in self.scope["headers"] if name == b"accept"])


Handler = Callable[[Service, _Call], Awaitable[tuple[bytes, bytes]]]  # → content type, body


async def embeddings(service: Service, call: _Call) -> tuple[bytes, bytes]:
    """`POST /v1/embeddings`."""
    request = await call.read(EmbeddingsRequest, service)
    service.check_model(request.model)
    service.check_foreign_ids(request.input, request.model)
    dimensions = service.check_dimensions(request.dimensions)
    encoded = await service.tokenize(
        request.input,
        call.receive,
        call.timing,
        call.options,
        param="input",
        truncate=request.truncate,
        prompt_name=request.prompt_name,
    )
    answer = await service.encode(
        encoded, call.receive, call.options, call.timing, dimensions=dimensions, normalize=request.normalize
    )
    if call.wants_raw:
        return _raw(call, answer.vectors)
    base64 = request.encoding_format == "base64"
    return JSON, await openai_json(answer.vectors, service.served_name, encoded.tokens, base64=base64)


async def embed(service: Service, call: _Call) -> tuple[bytes, bytes]:
    """`POST /embed`."""
    request = await call.read(EmbedRequest, service)
    dimensions = service.check_dimensions(request.dimensions)
    encoded = await service.tokenize(
        request.inputs,
        call.receive,
        call.timing,
        call.options,
        param="inputs",
        truncate=request.truncate,
        direction=request.truncation_direction,
        prompt_name=request.prompt_name,
    )
    answer = await service.encode(
        encoded, call.receive, call.options, call.timing, dimensions=dimensions, normalize=request.normalize
    )
    if call.wants_raw:
        return _raw(call, answer.vectors)
    return JSON, await floats_json(answer.vectors)


async def embed_all(service: Service, call: _Call) -> tuple[bytes, bytes]:
    """`POST /embed_all`."""
    request = await call.read(EmbedAllRequest, service)
    encoded = await service.tokenize(
        request.inputs,
        call.receive,
        call.timing,
        call.options,
        param="inputs",
        truncate=request.truncate,
        direction=request.truncation_direction,
        prompt_name=request.prompt_name,
    )
    service.admission.check_ready()
    limit = service.token_vector_limit
    if encoded.tokens > limit:
        raise PayloadTooLarge(f"`inputs` has {encoded.tokens} tokens; the limit for token vectors is {limit}", "inputs")
    answer = await service.encode(encoded, call.receive, call.options, call.timing, tokens=True)
    return JSON, await nested_floats_json(answer.vectors, encoded.lengths.tolist())


async def similarity(service: Service, call: _Call) -> tuple[bytes, bytes]:
    """`POST /similarity`."""
    request = await call.read(SimilarityRequest, service)
    if not request.inputs.source_sentence:
        raise EmptyInput("`inputs.source_sentence` must not be empty", "inputs")
    if not request.inputs.sentences:
        raise EmptyInput("`inputs.sentences` must not be an empty list", "inputs")
    for index, sentence in enumerate(request.inputs.sentences):
        if not sentence:
            raise EmptyInput(f"`inputs.sentences[{index}]` must not be empty", "inputs")
    parameters = request.parameters or SimilarityParameters()
    encoded = await service.tokenize(
        [request.inputs.source_sentence, *request.inputs.sentences],
        call.receive,
        call.timing,
        call.options,
        param="inputs",
        truncate=parameters.truncate,
        direction=parameters.truncation_direction,
        prompt_name=parameters.prompt_name,
    )
    answer = await service.encode(encoded, call.receive, call.options, call.timing)
    return JSON, orjson.dumps(answer.vectors[1:] @ answer.vectors[0], option=orjson.OPT_SERIALIZE_NUMPY)


async def tokenize(service: Service, call: _Call) -> tuple[bytes, bytes]:
    """`POST /tokenize`."""
    request = await call.read(TokenizeRequest, service)
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    if not texts:
        raise EmptyInput("`inputs` must not be an empty list", "inputs")
    service.check_count(len(texts), "inputs")
    service.check_open()
    prompt = service.prompt(request.prompt_name) if request.prompt_name is not None else ""
    turns = service.tokenizer.tokenize_turns(
        texts,
        add_special_tokens=request.add_special_tokens,
        prompt=prompt,
        most_unbroken=service.config.max_unbroken_characters,
    )
    call.timing.characters = sum(map(len, texts))
    check = partial(service.check_answer, param="inputs", more=True)
    call.timing.tokens, body = await service.in_turns(
        _written(turns, len(texts)), call.timing.characters, call.receive, call.options, check
    )
    service.check_answer(call.timing.tokens, "inputs")
    return JSON, body


def _written(turns: Iterator[list[tuple[int, list[TokenInfo]]]], texts: int) -> Turns[tuple[int, bytes]]:
    """Write tokens as JSON, turn by turn; gives their number and the text."""
    rows: list[list[bytes]] = [[] for _ in range(texts)]
    count = 0
    for turn in turns:
        for index, tokens in turn:
            count += len(tokens)
            if tokens:
                rows[index].append(orjson.dumps(tokens)[1:-1])
        yield count
    return count, b"[%b]" % b",".join(b"[%b]" % b",".join(row) for row in rows)


async def decode(service: Service, call: _Call) -> tuple[bytes, bytes]:
    """`POST /decode`."""
    request = await call.read(DecodeRequest, service)
    sequences, _ = service.sequences(request.ids, "ids")
    service.check_count(len(sequences), "ids")
    service.check_open()
    tokens = sum(map(len, sequences))
    service.check_answer(tokens, "ids")
    turns = service.tokenizer.decode_turns(sequences, skip_special_tokens=request.skip_special_tokens)
    texts = await service.in_turns(turns, tokens, call.receive, call.options, lambda _: None)
    return JSON, orjson.dumps(texts)


def _raw(call: _Call, vectors: np.ndarray[Any, np.dtype[np.float32]]) -> tuple[bytes, bytes]:
    call.headers.append((b"x-embedding-shape", b"%d,%d" % vectors.shape))
    return OCTETS, raw_rows(vectors)


# path → (handler, speaks OpenAI's dialect)
HOT_ROUTES: dict[str, tuple[Handler, bool]] = {
    "/v1/embeddings": (embeddings, True),
    "/embeddings": (embeddings, True),
    "/embed": (embed, False),
    "/": (embed, False),
    "/embed_all": (embed_all, False),
    "/similarity": (similarity, False),
    "/tokenize": (tokenize, False),
    "/decode": (decode, False),
}


class _HotRoute:
    """Body in, handler, answer out."""

    def __init__(self, service: Service, handler: Handler, *, openai: bool) -> None:
        self._service, self._handler, self._openai = service, handler, openai

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        try:
            call = _Call(scope, receive, service.config.request_timeout)
            await call.read_body(service)
            content_type, body = await self._handler(service, call)
        except ServerError as error:
            if error.reject_reason is not None:
                service.metrics.rejected[error.reject_reason].inc()
            await send_error(send, error, openai=self._openai)
            return
        if call.timing.answered is not None:
            service.metrics.response_encode_duration.observe(time.perf_counter() - call.timing.answered)
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *call.headers]
        headers += call.timing.headers(service.compute_type)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _check_encoding(headers: list[tuple[bytes, bytes]]) -> None:
    for name, value in headers:
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            given = describe_name(value.decode("latin-1"))
            raise UnsupportedEncoding(f"`Content-Encoding` must be `identity`, that is not compressed; it is {given}")


def hot_routes(service: Service) -> list[Route]:
    """The routes, to stand first in the app."""
    return [
        Route(path, endpoint=_HotRoute(service, handler, openai=openai), methods=["POST"], include_in_schema=False)
        for path, (handler, openai) in HOT_ROUTES.items()
    ]
