"""Ollama's protocol: embeddings of both forms, and the descriptions of models that its clients read."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from typing import Any, ClassVar

import orjson
from pydantic import BaseModel, Field

from embert.engine import Task
from embert.engine.tokenization.encoded import TokenizeOptions
from embert.server.protocols.fields import FIELDS
from embert.server.protocols.request_context import JSON, RequestContext
from embert.server.protocols.serialization import floats_json, floats_pieces, join
from embert.server.registry.model_handle import ModelHandle
from embert.server.request.request_body import InputForm, InputForms, RequestBody, TextList

_TAG = ":latest"  # Ollama's tag of a name without one
_MODEL = "The served model's name or id, with or without `:latest`."
_STARTED = datetime.now(UTC)


class OllamaEmbedRequest(RequestBody):
    """`POST /api/embed`."""

    known = FIELDS["ollama_embed"]
    input_forms: ClassVar[InputForms] = {"input": InputForm("a string or a list of strings", shortest=0, fewest=0)}

    model: str | None = Field(None, description=_MODEL)
    input: str | TextList | None = Field(None, description="A text, or texts. Without any, there are no vectors.")
    truncate: bool | None = Field(None, description="Cut texts that are too long. Default: true.")
    dimensions: int | None = Field(
        None,
        description="Cut the vectors to this many numbers, then normalize again; 0: all.",
        json_schema_extra={"minimum": 0},
    )


class OllamaEmbeddings(BaseModel):
    """Response of `/api/embed`. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingRequest(RequestBody):
    """`POST /api/embeddings`."""

    known = FIELDS["ollama_embeddings"]
    input_forms: ClassVar[InputForms] = {"prompt": InputForm(shortest=0)}

    model: str | None = Field(None, description=_MODEL)
    prompt: str | None = Field(None, description="A text. Without one, the vector is empty.")


class OllamaEmbedding(BaseModel):
    """Response of `/api/embeddings`."""

    embedding: list[float]


class OllamaShowRequest(RequestBody):
    """`POST /api/show`."""

    known = FIELDS["ollama_show"]

    model: str | None = Field(None, description=_MODEL)


class OllamaDetails(BaseModel):
    """Description of a model."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int
    embedding_length: int


class OllamaShow(BaseModel):
    """Response of `/api/show`."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: datetime


class OllamaModel(BaseModel):
    """A model in `/api/tags`."""

    name: str
    model: str
    modified_at: datetime
    size: int
    digest: str
    details: OllamaDetails
    capabilities: list[str]


class OllamaModels(BaseModel):
    """Response of `/api/tags`."""

    models: list[OllamaModel]


class OllamaVersion(BaseModel):
    """Response of `/api/version`."""

    version: str


class OllamaError(BaseModel):
    """Ollama's error."""

    error: str


async def embed(context: RequestContext) -> tuple[bytes, bytes]:
    request = await context.parse(OllamaEmbedRequest)
    handle = _choose(context, request.model)
    dimensions = handle.check_dimensions(request.dimensions or None)  # 0 means all, as in Ollama
    vectors, tokens = [b"[]"], 0
    if request.input:
        options = TokenizeOptions(truncate=request.truncate is not False, param="input")
        encoded = await context.tokenize(request.input, options)
        vectors = await floats_pieces((await context.run(encoded, dimensions=dimensions)).vectors)
        tokens = encoded.tokens
    duration = round((time.perf_counter() - context.breakdown.started) * 1e9)
    head = b'{"model":%b,"embeddings":' % orjson.dumps(handle.name)
    tail = b',"total_duration":%d,"load_duration":0,"prompt_eval_count":%d}' % (duration, tokens)
    vectors.insert(0, head)
    vectors.append(tail)
    return JSON, await join(vectors)


async def embeddings(context: RequestContext) -> tuple[bytes, bytes]:
    """`POST /api/embeddings`, whose vectors are not normalized."""
    request = await context.parse(OllamaEmbeddingRequest)
    _choose(context, request.model)
    if not request.prompt:
        return JSON, b'{"embedding":[]}'
    encoded = await context.tokenize(request.prompt, TokenizeOptions(truncate=True, param="prompt"))
    vectors = (await context.run(encoded, normalize=False)).vectors
    return JSON, b'{"embedding":%b}' % (await floats_json(vectors))[1:-1]


async def show(context: RequestContext) -> tuple[bytes, bytes]:
    request = await context.parse(OllamaShowRequest)
    handle = _choose(context, request.model)
    model = handle.model
    family = model.config.model_type
    response = OllamaShow(
        modelfile="",
        parameters="",
        template="",
        details=_details(handle),
        model_info={
            "general.architecture": family,
            f"{family}.context_length": model.max_input_length,
            f"{family}.embedding_length": model.width,
        },
        capabilities=_capabilities(handle),
        modified_at=_STARTED,
    )
    return JSON, response.model_dump_json().encode()


def describe(handle: ModelHandle) -> OllamaModel:
    """The model as `/api/tags` lists it."""
    model, name = handle.model, handle.name
    full_name = name if ":" in name.rpartition("/")[2] else name + _TAG
    return OllamaModel(
        name=full_name,
        model=full_name,
        modified_at=_STARTED,
        size=sum(file.stat().st_size for file in model.weights_folder.glob("*.safetensors") if file.is_file()),
        digest=hashlib.sha256(f"{model.model_id}@{model.revision}".encode()).hexdigest(),
        details=_details(handle),
        capabilities=_capabilities(handle),
    )


def _choose(context: RequestContext, name: str | None) -> ModelHandle:
    """Chooses the model of this name, or of the name with or without the tag `:latest`."""
    name = name or ""
    bare = name.removesuffix(_TAG)
    names = (name, bare, bare + _TAG)
    return context.choose(next(filter(context.is_model, names), name))


def _details(handle: ModelHandle) -> OllamaDetails:
    model, engine = handle.model, handle.engine
    return OllamaDetails(
        parent_model="",
        format="safetensors",
        family=model.config.model_type,
        families=[model.config.model_type],
        parameter_size="",
        quantization_level=engine.dtype if engine else handle.config.dtype,
        context_length=model.max_input_length,
        embedding_length=model.width,
    )


def _capabilities(handle: ModelHandle) -> list[str]:
    return ["embedding"] if Task.EMBED in handle.model.tasks else []
