"""OpenAI's dialect."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, Field

from embert.server.api.input.request_body import TEXT_OR_IDS, InputForms, RequestBody, TextOrIds
from embert.server.api.request_context import JSON, RequestContext
from embert.server.api.serialization import openai_json
from embert.server.api.service import Service
from embert.server.http.errors import Invalid

__all__ = ["EmbeddingList", "EmbeddingsRequest", "OpenAIError", "embeddings"]


class EmbeddingsRequest(RequestBody):
    """`POST /v1/embeddings`: OpenAI's fields, and three extensions."""

    input_forms: ClassVar[InputForms] = {"input": TEXT_OR_IDS}

    input: TextOrIds = Field(description="A text, texts, token ids of one text, or token ids of several.")
    model: str | None = Field(None, description="The served model's name or id.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64 is little-endian float32. Default: float."
    )
    dimensions: int | None = Field(None, description="Cut the vectors to this many numbers, then normalise again.")
    user: str | None = Field(None, description="Accepted and ignored.")
    truncate: bool | None = Field(
        None, description="Cut texts that are too long. Default: the server's --auto-truncate."
    )
    prompt_name: str | None = Field(None, description="One of the model's prompts, put before each text.")
    normalize: bool = Field(True, description="Scale vectors to length 1.")


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


class OpenAIErrorFacts(BaseModel):
    """What went wrong."""

    message: str
    type: Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """OpenAI's error."""

    error: OpenAIErrorFacts


async def embeddings(context: RequestContext) -> tuple[bytes, bytes]:
    """`POST /v1/embeddings`."""
    service = context.service
    request = await context.parse(EmbeddingsRequest)
    service.check_model(request.model)
    _check_foreign_ids(service, request)
    dimensions = service.check_dimensions(request.dimensions)
    encoded = await context.tokenize(
        request.input,
        param="input",
        truncate=request.truncate,
        prompt_name=request.prompt_name,
    )
    answer = await context.run(encoded, dimensions=dimensions, normalize=request.normalize)
    if context.wants_raw:
        return context.raw(answer.vectors)
    base64 = request.encoding_format == "base64"
    return JSON, await openai_json(answer.vectors, service.served_name, encoded.tokens, base64=base64)


def _check_foreign_ids(service: Service, request: EmbeddingsRequest) -> None:
    """Raise Invalid for token ids that may be another tokenizer's.

    Clients of OpenAI's models tokenise for those models. Vectors of such ids are wrong, and nothing shows it.
    """
    given = request.input
    if isinstance(given, str) or not given or isinstance(given[0], str) or given[0] == []:
        return
    if service.config.accept_token_ids and request.model is not None:  # check_model has seen that it is this one
        return
    needed = (
        "or name the served model in `model`"
        if service.config.accept_token_ids
        else "or start the server with --accept-token-ids and name the served model in `model`"
    )
    raise Invalid(
        "`input` holds token ids, which are those of another model's tokenizer in most clients; send text "
        f"(in LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False)), {needed}",
        "input",
    )
