"""OpenAI's protocol."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from embert.engine import Task
from embert.engine.tasks import NO_TASK
from embert.engine.tokenization.encoded import TokenizeOptions
from embert.server.http.errors import Invalid, describe_name
from embert.server.http.response import Body
from embert.server.protocols.fields import FIELDS
from embert.server.protocols.request_context import JSON, RequestContext
from embert.server.protocols.serialization import NumberType, compute, openai_json, quantize, typed_openai_json
from embert.server.registry.model_handle import Capability, ModelHandle
from embert.server.request.request_body import (
    FAIL_FAST,
    TASK,
    TEXT_OR_IDS,
    Direction,
    InputForms,
    RequestBody,
    TextOrIds,
)

_QUERY = {"query", "search_query"}  # the latter is Cohere's word; a passage is NVIDIA's word for a document
_DOCUMENT = {"document", "search_document", "passage"}
# Names of prompts as sentence-transformers looks for them, and as models have them.
_QUERY_PROMPTS = ("query", "search_query", "retrieval.query", "s2p_query")
_DOCUMENT_PROMPTS = ("document", "passage", "corpus", "search_document", "retrieval.passage")
_OTHER_TYPES = {"classification", "clustering"}  # Cohere's, which few models have prompts for
_TASKS = {"dense": Task.EMBED, "sparse": Task.SPARSE, "colbert": Task.MULTI}
_DENSE = Capability(Task.EMBED)


class EmbeddingsRequest(RequestBody):
    """`POST /v1/embeddings`: OpenAI's fields, and extensions."""

    known = FIELDS["embeddings"]
    input_forms: ClassVar[InputForms] = {"input": TEXT_OR_IDS}

    input: TextOrIds = Field(description="A text, texts, token ids of one text, or token ids of several.")
    model: str | None = Field(None, description="The served model's name or id.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64 is little-endian float32. Default: float."
    )
    dimensions: int | None = Field(
        None,
        description="Cut the vectors to this many numbers, then normalize again; 0: all, as Infinity has it.",
        json_schema_extra={"minimum": 0},
    )
    output_dtype: Literal["float", "int8", "uint8", "binary", "ubinary"] | None = Field(
        None, description="The type of the numbers, of dense vectors only. Default: float."
    )
    truncate: bool | None = Field(
        None, description="Cut texts that are too long. Default: the server's --auto-truncate."
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Cut texts to this many tokens; -1: to the model's limit. Default: see `truncate`."
    )
    truncation_side: Direction | None = Field(
        None, description="The end that is cut off. Default: the model's, mostly right."
    )
    priority: int | None = Field(None, description="Above 0: as `X-Priority: bulk`.")
    prompt_name: str | None = Field(None, description="One of the model's prompts, put before each text.")
    instruction: str | None = Field(
        None, description="An instruction, in place of that in the model's prompt of queries."
    )
    task: str | None = Field(None, description=TASK)
    normalize: bool = Field(True, description="Scale vectors to length 1.")
    embedding_types: Annotated[list[Literal["dense", "sparse", "colbert"]], FAIL_FAST] | None = Field(
        None, description="The kinds of vectors wanted of each text, of those that the model has. Default: dense."
    )
    # Clients of other servers send values that mean nothing to dense and to sparse vectors.
    input_type: Any = Field(
        None,
        description="Role of the texts: query or document. It chooses one of the model's prompts or adapters; "
        "colbert's vectors are of documents by default.",
        examples=["query", "document"],
    )


class SparseEmbedding(BaseModel):
    """A sparse vector: the tokens' ids, ascending, and their weights."""

    indices: list[int]
    values: list[float]


class Embedding(BaseModel):
    """One text's vectors, each as numbers or as base64 of little-endian float32."""

    object: Literal["embedding"]
    embedding: list[float] | str  # empty where `embedding_types` has no dense
    index: int
    sparse: SparseEmbedding | None = None
    multi_vector: list[list[float] | str] | None = None
    token_ids: list[int] | None = None  # of the vectors in `multi_vector`


class Usage(BaseModel):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """Response of `/v1/embeddings`."""

    id: str
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class OpenAIErrorFields(BaseModel):
    """Fields of an error."""

    message: str
    type: Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """OpenAI's error."""

    error: OpenAIErrorFields


async def embeddings(context: RequestContext) -> tuple[bytes, Body]:
    """`POST /v1/embeddings`, and Azure's path of it, which names the model."""
    request = await context.parse(EmbeddingsRequest)
    capability = _DENSE if request.embedding_types is None else Capability(_kinds(request.embedding_types))
    # Azure reads the deployment in the path alone; its clients send the name of OpenAI's model behind it in the body.
    deployment = context.deployment
    name = request.model if deployment is None else deployment
    handle = context.choose(name, capability=capability, priority=request.priority)
    check_foreign_ids(context, request.input, name)
    tasks, is_query = _tasks(request)
    handle.check_tasks(tasks)
    prompt_name = request.prompt_name
    if request.input_type is not None and is_query is None and (request.task is None or not _names_prompts(handle)):
        prompt_name, is_query = read_input_type(handle, request.input_type, request.input, prompt_name)
    if request.instruction is not None:
        if isinstance(request.input_type, str) and request.input_type in _DOCUMENT:
            raise Invalid("is for queries, and `input_type` says that these are documents", "instruction")
        prompt_name = request.prompt_name  # not that of `input_type`
    dimensions = handle.check_dimensions(request.dimensions or None)  # 0 is the default of Infinity's client
    number_type = _number_type(request, tasks, dimensions or handle.model.width)
    limit = request.truncate_prompt_tokens
    encoded = await context.tokenize(
        request.input,
        TokenizeOptions(
            truncate=request.truncate if request.truncate is not None or limit is None else True,
            direction=request.truncation_side,
            limit=handle.check_limit(limit, is_query=is_query),
            is_query=is_query,
            param="input",
        ),
        task=request.task,
        prompt_name=prompt_name,
        instruction=request.instruction,
    )
    whole = number_type is not None and handle.model.whole_numbers
    normalize = request.normalize and not whole
    result = await context.run(encoded, tasks, dimensions=dimensions, normalize=normalize)
    raw = context.wants_raw
    if raw and tasks == Task.EMBED and number_type is None:
        return await context.raw(result.vectors)
    if raw and tasks == Task.MULTI:
        return await context.raw(result.vectors, result.rows[Task.MULTI].counts.tolist())
    base64 = request.encoding_format == "base64"
    if number_type is not None:
        quantized = await compute(result.vectors.size, quantize, result.vectors, number_type, whole=whole)
        return JSON, await openai_json(quantized, handle.name, encoded.tokens, base64=base64)
    if tasks == Task.EMBED:
        return JSON, await openai_json(result.vectors, handle.name, encoded.tokens, base64=base64)
    return JSON, await typed_openai_json(
        result.rows, handle.name, encoded.tokens, base64=base64, token_ids=result.token_ids
    )


def _kinds(names: list[Literal["dense", "sparse", "colbert"]]) -> Task:
    tasks = NO_TASK
    for name in names:
        tasks |= _TASKS[name]
    return tasks


def _tasks(request: EmbeddingsRequest) -> tuple[Task, bool | None]:
    """Returns the tasks, and True for queries, False for documents, None if it makes no difference. Raises Invalid."""
    if request.embedding_types is None:
        return Task.EMBED, None
    tasks = _kinds(request.embedding_types)
    if not tasks:
        raise Invalid("must name one of dense, sparse and colbert", "embedding_types", value="empty")
    if request.dimensions is not None and Task.EMBED not in tasks:
        raise Invalid("is for dense vectors, and `embedding_types` does not name them", "dimensions")
    if Task.MULTI not in tasks:
        return tasks, None
    return tasks, request.input_type is not None and _role(request.input_type)


def _number_type(request: EmbeddingsRequest, tasks: Task, columns: int) -> NumberType | None:
    """The type of numbers; None for float32. Raises Invalid for one that these vectors do not have."""
    kind = request.output_dtype
    if kind is None or kind == "float":
        return None
    if tasks != Task.EMBED:
        raise Invalid(f"{kind} is for dense vectors only", "output_dtype")
    check_number_type(kind, columns, "output_dtype")
    return kind


def check_number_type(kind: NumberType, columns: int, param: str) -> None:
    """Raise Invalid for bits of vectors that do not fill bytes; `param` is the field with the type."""
    if kind in ("binary", "ubinary") and columns % 8:
        raise Invalid(f"{kind} is for vectors of a multiple of 8 numbers; these have {columns}", param)


def read_input_type(
    handle: ModelHandle, input_type: Any, texts: TextOrIds, prompt_name: str | None = None
) -> tuple[str | None, bool | None]:
    """Returns the name of a prompt, or if adapters name prompts, True if texts are queries. Raises Invalid."""
    if _names_prompts(handle):
        return prompt_name, _role(input_type)
    return _prompt_of(handle, input_type, texts) if prompt_name is None else prompt_name, None


def _names_prompts(handle: ModelHandle) -> bool:
    """True if the model has adapters whose names are also those of prompts."""
    adapters = handle.model.config.adapters
    return adapters is not None and adapters.names_prompts


def _prompt_of(handle: ModelHandle, input_type: Any, texts: TextOrIds) -> str | None:
    """The name of the model's prompt for texts of this type, if there is one; ids are taken as they are."""
    if not isinstance(input_type, str):
        raise Invalid("must be a string", "input_type")
    if not isinstance(texts, str) and (not texts or not isinstance(texts[0], str)):
        return None
    prompts = handle.model.prompts
    names = _QUERY_PROMPTS if input_type in _QUERY else _DOCUMENT_PROMPTS if input_type in _DOCUMENT else (input_type,)
    prompt_name = next((name for name in names if name in prompts), None)
    if prompt_name is None and prompts and input_type not in _QUERY | _DOCUMENT | _OTHER_TYPES:
        raise Invalid(
            f"must be query, document or one of the model's prompts ({', '.join(sorted(prompts))})",
            "input_type",
            value=describe_name(input_type),
        )
    return prompt_name


def _role(input_type: Any) -> bool:
    """True for queries, in the words of several APIs. Raises Invalid."""
    if isinstance(input_type, str) and input_type in _QUERY | _DOCUMENT:
        return input_type in _QUERY
    raise Invalid("must be query or document", "input_type")


def check_foreign_ids(context: RequestContext, texts: TextOrIds, model: str | None) -> None:
    """Raise Invalid for token ids that may be another tokenizer's, in a request that names this model.

    Clients of OpenAI's models tokenize for those models. Vectors of such ids are wrong, and nothing shows it.
    """
    if isinstance(texts, str) or not texts or isinstance(texts[0], str) or texts[0] == []:
        return
    handle = context.handle
    if "token-ids" in handle.config.openai_accepts and handle.is_named(model or context.path_model):
        return
    needed = (
        "or name the served model in `model`"
        if "token-ids" in handle.config.openai_accepts
        else "or start the server with --openai-accepts token-ids and name the served model in `model`"
    )
    raise Invalid(
        "holds token ids, which are those of another model's tokenizer in most clients; send text "
        f"(in LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False)), {needed}",
        "input",
    )
