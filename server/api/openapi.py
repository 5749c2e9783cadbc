"""The OpenAPI document's part about the hot routes, which FastAPI does not see."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, RootModel
from pydantic.json_schema import models_json_schema

from embert.engine import Model
from embert.server.api.schemas import (
    DecodeRequest,
    EmbedAllRequest,
    EmbeddingsRequest,
    EmbedRequest,
    SimilarityRequest,
    TokenizeRequest,
)

__all__ = ["OpenAIError", "TeiError", "add_hot_routes"]


class Embedding(BaseModel):
    """One vector, as numbers or as base64 of little-endian float32."""

    object: Literal["embedding"]
    embedding: list[float] | str
    index: int


class Usage(BaseModel):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """Answer of `/v1/embeddings`."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Vectors(RootModel[list[list[float]]]):
    """A vector a text."""


class TokenVectors(RootModel[list[list[list[float]]]]):
    """A vector a token a text."""


class Similarities(RootModel[list[float]]):
    """A cosine a sentence."""


class Token(BaseModel):
    """One token, and where it stands in the text."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Tokens(RootModel[list[list[Token]]]):
    """Tokens a text."""


class Texts(RootModel[list[str]]):
    """A text a list of ids."""


class OpenAIErrorFacts(BaseModel):
    """What went wrong."""

    message: str
    type: Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """OpenAI's error."""

    error: OpenAIErrorFacts


class TeiError(BaseModel):
    """text-embeddings-inference's error."""

    error: str
    error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty", "Unauthorized"]


_ERRORS = {
    400: "The body is not JSON, or there is nothing to encode",
    401: "No key or a wrong one",
    404: "Another model",
    408: "The body did not arrive in time",
    413: "Too many bytes or texts",
    422: "A field's type or value",
    424: "The encoder failed on this request",
    429: "Over the queue's token budget; see Retry-After",
    503: "Loading, draining, the engine restarting, or out of time",
}

_HEADERS = (
    "The header `X-Request-Timeout` says in how many seconds the answer is wanted, `X-Priority: bulk` that others may "
    "go first."
)

_RAW = {
    "application/octet-stream": {
        "schema": {
            "type": "string",
            "format": "binary",
            "description": "little-endian float32 rows; see X-Embedding-Shape",
        }
    }
}

# path, request, answer, summary, example, answers raw bytes on demand
_Row = tuple[str, type[BaseModel], type[BaseModel], str, dict[str, Any], bool]
_HOT: list[_Row] = [
    ("/v1/embeddings", EmbeddingsRequest, EmbeddingList, "Embeddings, OpenAI's way", {"input": "Hello, world"}, True),
    ("/embeddings", EmbeddingsRequest, EmbeddingList, "Alias of /v1/embeddings", {"input": "Hello, world"}, True),
    ("/embed", EmbedRequest, Vectors, "Embeddings, TEI's way", {"inputs": ["Hello, world"]}, True),
    ("/", EmbedRequest, Vectors, "Alias of /embed", {"inputs": ["Hello, world"]}, True),
    ("/embed_all", EmbedAllRequest, TokenVectors, "A vector for every token", {"inputs": "Hello, world"}, False),
    (
        "/similarity",
        SimilarityRequest,
        Similarities,
        "Cosine of one text with others",
        {"inputs": {"source_sentence": "a cat", "sentences": ["a kitten", "a car"]}},
        False,
    ),
    ("/tokenize", TokenizeRequest, Tokens, "Texts to tokens", {"inputs": "Hello, world"}, False),
    ("/decode", DecodeRequest, Texts, "Token ids to texts", {"ids": [101, 7592, 102]}, False),
]


def add_hot_routes(document: dict[str, Any], model: Model, max_texts: int) -> dict[str, Any]:
    """Complete FastAPI's document in place, with the bounds of the model served, and return it."""
    models = {model for row in _HOT for model in row[1:3]} | {OpenAIError, TeiError}
    ordered = sorted(models, key=lambda model: model.__name__)
    inputs: list[tuple[Any, Literal["validation"]]] = [(model, "validation") for model in ordered]
    names, schemas = models_json_schema(inputs, ref_template="#/components/schemas/{model}")
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]
    paths: dict[str, Any] = {}
    for path, request, answer, summary, example, raw in _HOT:
        openai = path in ("/v1/embeddings", "/embeddings")
        error = {"application/json": {"schema": names[OpenAIError if openai else TeiError, "validation"]}}
        content: dict[str, Any] = {"application/json": {"schema": names[answer, "validation"]}}
        operation = {
            "tags": ["OpenAI" if openai else "TEI"],
            "summary": summary,
            "description": _HEADERS,
            "operationId": "post_" + (path.strip("/").replace("/", "_") or "root"),
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": names[request, "validation"], "example": example}},
            },
            "responses": {"200": {"description": "Answer", "content": content | _RAW if raw else content}}
            | {str(status): {"description": text, "content": error} for status, text in _ERRORS.items()},
        }
        paths[path] = {"post": operation}
    paths["/"] |= document["paths"].pop("/")  # the page for browsers, a GET
    document["paths"] = paths | document["paths"]  # the work first, operations after it
    _state_bounds(document["components"]["schemas"], model, max_texts)
    # FastAPI's own answer for parameters that are not valid, which no route of ours has.
    document["paths"]["/v1/models/{id}"]["get"]["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document


def _state_bounds(schemas: dict[str, Any], model: Model, max_texts: int) -> None:
    """What `schemas` leaves to the routes, because it depends on the model or is 400 there."""

    def bound(schema: dict[str, Any], shortest: int) -> None:
        for form in schema.get("anyOf", [schema]):
            if form["type"] == "string":
                form["minLength"] = shortest
            elif form["type"] == "integer":
                form.update(minimum=0, maximum=model.architecture.vocab_size - 1)
            elif form["type"] == "array":
                form["minItems"] = 1
                if form["items"]["type"] != "integer":
                    form["maxItems"] = max_texts
                bound(form["items"], shortest)

    for name, fields in {
        "EmbeddingsRequest": ["input"],
        "EmbedRequest": ["inputs"],
        "EmbedAllRequest": ["inputs"],
        "SimilarityInputs": ["source_sentence", "sentences"],
        "TokenizeRequest": ["inputs"],
        "DecodeRequest": ["ids"],
    }.items():
        for field in fields:
            bound(schemas[name]["properties"][field], 0 if name == "TokenizeRequest" else 1)
    for schema in schemas.values():
        for field, property_ in schema.get("properties", {}).items():
            if field == "dimensions" and "anyOf" in property_:
                property_["anyOf"][0].update(minimum=1, maximum=model.width)
            elif field == "prompt_name":
                property_["anyOf"][0]["enum"] = sorted(model.prompts)
                if not model.prompts:
                    property_["anyOf"].pop(0)
