"""Cohere's protocol: its embeddings, and the second version of its reranking."""

from __future__ import annotations

import builtins
import uuid
from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BaseModel, ConfigDict, Field

from embert.engine import Task
from embert.engine.heads.embedding import normalize_rows
from embert.engine.tokenization.encoded import Direction, TokenizeOptions
from embert.server.http.errors import Invalid
from embert.server.protocols.fields import FIELDS
from embert.server.protocols.openai import check_number_type, read_input_type
from embert.server.protocols.ranking import join_rows, rank
from embert.server.protocols.request_context import JSON, RequestContext
from embert.server.protocols.rerank import INSTRUCTION, CohereMeta, RerankResult, cohere_meta, result_rows
from embert.server.protocols.serialization import compute, floats_pieces, join, quantize, response_id
from embert.server.request.request_body import FAIL_FAST, InputForm, InputForms, RequestBody, TextList

_DOCUMENT_TOKENS = 4096  # default limit of a document


class CohereError(BaseModel):
    """Cohere's error."""

    id: str
    message: str


class CohereRerankRequest(RequestBody):
    """`POST /v2/rerank`."""

    known = FIELDS["cohere_rerank"]
    text_limit: ClassVar[str] = "max_client_documents"
    input_forms: ClassVar[InputForms] = {
        "query": InputForm(shortest=0),
        "documents": InputForm("a list of strings", shortest=0),
    }

    model: str | None = Field(None, description="The served model's name or id.")
    query: str = Field(description="Text that the documents are compared with.")
    documents: TextList
    top_n: int | None = Field(None, ge=1, description="Return only the best. More than there are, or null: all.")
    max_tokens_per_doc: int | None = Field(
        None, ge=1, description="Cut documents to this many tokens. Default, and null: 4096."
    )
    priority: int | None = Field(None, ge=0, le=999, description="Above 0: as `X-Priority: bulk`.")
    return_documents: bool | None = Field(
        None, description="An extension, which litellm sends: return the documents' texts too. Default: false."
    )
    instruction: str | None = Field(None, description=INSTRUCTION)


class CohereRanking(BaseModel):
    """Response of `/v2/rerank`."""

    id: str
    results: list[RerankResult]
    meta: CohereMeta


async def rerank(context: RequestContext) -> tuple[bytes, bytes]:
    request = await context.parse(CohereRerankRequest)
    context.choose(request.model, priority=request.priority)
    ranking = await rank(
        context,
        request.query,
        request.documents,
        top_n=request.top_n,
        raw=False,
        options=TokenizeOptions(
            instruction=request.instruction,
            second_limit=request.max_tokens_per_doc or _DOCUMENT_TOKENS,
            param="query",
            second_param="documents",
        ),
    )
    rows = await join_rows(result_rows(ranking, request.documents if request.return_documents else None))
    meta = cohere_meta(b"2", ranking.tokens)
    head = b'{"id":"%b","results":[' % str(uuid.uuid4()).encode()
    return JSON, await join([head, rows, b'],"meta":%b}' % meta])


# --- embeddings ---

_BYTES_A_CHARACTER = 2  # of a text in the response: mostly 1, as JSON at most 6
EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
_CUTS: dict[str | None, tuple[bool | None, Direction | None]] = {
    "NONE": (False, None),
    "START": (True, "left"),
    "END": (True, "right"),
    None: (None, None),
}


class CohereContent(RequestBody):
    """A part of an input. Other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: str


class CohereInput(RequestBody):
    """An input of one part. Other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    content: Annotated[list[CohereContent], FAIL_FAST]


class CohereEmbedRequest(RequestBody):
    """`POST /v1/embed` and `/v2/embed`."""

    known = FIELDS["cohere_embed"]
    input_forms: ClassVar[InputForms] = {"texts": InputForm("a list of strings")}

    model: str | None = Field(None, description="The served model's name or id.")
    texts: TextList | None = Field(None, description="The texts; or in `inputs`.")
    inputs: Annotated[list[CohereInput], FAIL_FAST] | None = Field(
        None, description="The texts, each as the one part of an object's `content`."
    )
    input_type: str | None = Field(
        None, description="Role of the texts: chooses one of the model's prompts or adapters, if it has some."
    )
    embedding_types: Annotated[list[EmbeddingType], FAIL_FAST] | None = Field(
        None, description="The types of the numbers. Default: float."
    )
    truncate: Literal["NONE", "START", "END"] | None = Field(
        None, description="The end of a text that is cut off; NONE: a text that is too long is an error."
    )
    max_tokens: int | None = Field(None, ge=1, description="Cut texts to this many tokens.")
    output_dimension: int | None = Field(
        None, description="Cut the vectors to this many numbers, then normalize again."
    )
    priority: int | None = Field(None, ge=0, le=999, description="Above 0: as `X-Priority: bulk`.")


class CohereVectors(BaseModel):
    """The vectors of each type that was asked for."""

    float: list[list[builtins.float]] | None = None
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None


class CohereEmbeddings(BaseModel):
    """Response of `/v2/embed`, and of `/v1/embed`, which has a list of vectors where no types were asked for."""

    id: str
    embeddings: CohereVectors | list[list[float]]
    texts: list[str]
    meta: CohereMeta
    response_type: Literal["embeddings_by_type", "embeddings_floats"]


async def embed(context: RequestContext) -> tuple[bytes, bytes]:
    request = await context.parse(CohereEmbedRequest)
    handle = context.choose(request.model, priority=request.priority)
    texts, param = _texts(request)
    default: list[EmbeddingType] = ["float"]
    types = list(dict.fromkeys(default if request.embedding_types is None else request.embedding_types))
    if not types:
        raise Invalid("must name one type or more", "embedding_types", value="empty")
    dimensions = handle.check_dimensions(request.output_dimension, "output_dimension")
    for kind in types:
        if kind == "binary" or kind == "ubinary":
            check_number_type(kind, dimensions or handle.model.width, "embedding_types")
    if request.input_type == "image":
        raise Invalid("must be of texts: models read nothing else", "input_type", value="'image'")
    prompt_name, is_query = None, None
    if request.input_type is not None:
        prompt_name, is_query = read_input_type(handle, request.input_type, texts)
    truncate, side = _CUTS[request.truncate]
    limit = handle.check_limit(request.max_tokens, is_query=is_query, param="max_tokens")
    encoded = await context.tokenize(
        texts,
        TokenizeOptions(
            truncate=True if truncate is None and limit is not None else truncate,
            direction=side,
            limit=limit,
            is_query=is_query,
            param=param,
        ),
        prompt_name=prompt_name,
    )
    more = (len(types) - 1) * handle.response_bytes(encoded, Task.EMBED, dimensions)  # than `run` counts
    context.hold(more + _BYTES_A_CHARACTER * sum(map(len, texts)), "the response")
    whole = handle.model.whole_numbers and any(kind not in ("float", "base64") for kind in types)
    vectors = (await context.run(encoded, dimensions=dimensions, normalize=not whole)).vectors
    version = b"1" if context.scope["path"].endswith("/v1/embed") else b"2"
    if version == b"1" and request.embedding_types is None:
        rows, form = await floats_pieces(vectors), b"floats"
    else:
        rows, form = [b"{"], b"by_type"
        for kind in types:
            rows.append(b'%b"%b":' % (b"," if len(rows) > 1 else b"", kind.encode()))
            rows += await _write_type(vectors, kind, whole=whole)
        rows.append(b"}")
    head = b'{"id":"%b","embeddings":' % response_id()
    meta = cohere_meta(version, encoded.tokens)
    tail = b',"texts":%b,"meta":%b,"response_type":"embeddings_%b"}' % (orjson.dumps(texts), meta, form)
    rows.insert(0, head)
    rows.append(tail)
    return JSON, await join(rows)


async def _write_type(vectors: npt.NDArray[np.float32], kind: EmbeddingType, *, whole: bool) -> list[bytes]:
    """Writes vectors, which are not normalized yet if `whole`, in pieces for `join`."""
    match kind:
        case "float" | "base64":
            return await floats_pieces(normalize_rows(vectors) if whole else vectors, base64=kind == "base64")
        case _:
            return await floats_pieces(await compute(vectors.size, quantize, vectors, kind, whole=whole))


def _texts(request: CohereEmbedRequest) -> tuple[list[str], str]:
    """The texts, and the field that they are in. Raises Invalid."""
    if (request.texts is None) == (request.inputs is None):
        has = "neither" if request.texts is None else "both"
        raise Invalid(f"is required, or `inputs` in its place; the request has {has}", "texts")
    if request.inputs is None:
        assert request.texts is not None  # noqa: S101 - one of both is there
        return request.texts, "texts"
    for index, item in enumerate(request.inputs):
        if len(item.content) != 1:
            raise Invalid(f"must have one part; it has {len(item.content)}", "inputs", path=f"[{index}].content")
    return [item.content[0].text for item in request.inputs], "inputs"
