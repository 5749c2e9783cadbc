"""text-embeddings-inference's protocol."""

from __future__ import annotations

from typing import ClassVar, Literal

import orjson
from pydantic import BaseModel, Field, RootModel

from embert.engine import Encoded, Task
from embert.engine.tokenization.encoded import TokenizeOptions
from embert.server.http.response import Body
from embert.server.protocols.fields import FIELDS
from embert.server.protocols.request_context import JSON, RequestContext
from embert.server.protocols.serialization import floats_json, nested_floats_json, sparse_json
from embert.server.registry.tokenizing import check_texts
from embert.server.request.request_body import (
    MODELS_DIRECTION,
    TASK,
    TEXTS_AND_IDS,
    Direction,
    InputForm,
    InputForms,
    InputType,
    RequestBody,
    RequestObject,
    TextList,
    TextsAndIds,
)


class TeiError(BaseModel):
    """text-embeddings-inference's error."""

    error: str
    error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty", "Unauthorized"]


# --- embeddings ---


class EmbedSparseRequest(RequestBody):
    """`POST /embed_sparse`: (index, value) pairs. And what all requests for vectors have."""

    known = FIELDS["embed_sparse"]
    input_forms: ClassVar[InputForms] = {"inputs": TEXTS_AND_IDS}

    inputs: TextsAndIds = Field(description="A text, token ids of one text, or a list of texts and of such ids.")
    truncate: bool | None = Field(
        None, description="Cut texts that are too long. Default: the server's --auto-truncate."
    )
    truncation_direction: Direction = Field(
        MODELS_DIRECTION, description="The end that is cut off. Default: the model's, mostly right."
    )
    prompt_name: str | None = Field(None, description="One of the model's prompts, put before each text.")
    task: str | None = Field(None, description=TASK)


class EmbedAllRequest(EmbedSparseRequest):
    """`POST /embed_all`: one vector a token."""

    known = FIELDS["embed_all"]
    input_type: InputType | None = Field(
        None,
        description="What the texts are to a model of late interaction, document by default, or to one with adapters.",
    )


class EmbedRequest(EmbedSparseRequest):
    """`POST /embed`: text-embeddings-inference's fields."""

    known = FIELDS["embed"]
    normalize: bool = Field(True, description="Scale vectors to length 1.")
    dimensions: int | None = Field(None, description="Cut the vectors to this many numbers, then normalize again.")


class Vectors(RootModel[list[list[float]]]):
    """A vector a text."""


class TokenVectors(RootModel[list[list[list[float]]]]):
    """A vector a token a text."""


class SparseValue(BaseModel):
    """The weight of a token of the vocabulary."""

    index: int
    value: float


class SparseVectors(RootModel[list[list[SparseValue]]]):
    """A sparse vector a text: non-zeros, by index."""


async def embed(context: RequestContext) -> tuple[bytes, Body]:
    request = await context.parse(EmbedRequest)
    dimensions = context.handle.check_dimensions(request.dimensions)
    encoded = await _tokenize(context, request)
    result = await context.run(encoded, dimensions=dimensions, normalize=request.normalize)
    if context.wants_raw:
        return await context.raw(result.vectors)
    return JSON, await floats_json(result.vectors)


async def embed_sparse(context: RequestContext) -> tuple[bytes, bytes]:
    request = await context.parse(EmbedSparseRequest)
    result = await context.run(await _tokenize(context, request), Task.SPARSE)
    return JSON, await sparse_json(result.rows[Task.SPARSE])


async def embed_all(context: RequestContext) -> tuple[bytes, Body]:
    """`POST /embed_all`: the last hidden states, or what a model of late interaction has in their place."""
    handle = context.handle
    has = handle.model.tasks
    task = Task.MULTI if Task.MULTI in has and Task.TOKENS not in has else Task.TOKENS
    handle.check_tasks(task)
    request = await context.parse(EmbedAllRequest)
    is_query = handle.is_query(request.input_type, task)
    result = await context.run(await _tokenize(context, request, is_query), task)
    rows = result.rows[task]
    if context.wants_raw:
        return await context.raw(rows.values, rows.counts.tolist())
    return JSON, await nested_floats_json(rows.values, rows.counts.tolist())


async def _tokenize(context: RequestContext, request: EmbedSparseRequest, is_query: bool | None = None) -> Encoded:
    return await context.tokenize(
        request.inputs,
        TokenizeOptions(truncate=request.truncate, direction=request.truncation_direction, is_query=is_query),
        task=request.task,
        prompt_name=request.prompt_name,
    )


# --- similarity ---


class SimilarityInputs(RequestObject):
    """One text, and the texts it is compared with."""

    known = FIELDS["similarity.inputs"]
    input_forms: ClassVar[InputForms] = {"source_sentence": InputForm(), "sentences": InputForm()}

    source_sentence: str
    sentences: TextList


class SimilarityParameters(RequestObject):
    """Options for reading texts."""

    known = FIELDS["similarity.parameters"]
    truncate: bool | None = None
    truncation_direction: Direction = MODELS_DIRECTION
    prompt_name: str | None = None
    task: str | None = Field(default=None, description=TASK)


class SimilarityRequest(RequestBody):
    """`POST /similarity`: cosine of one text with each of several."""

    known = FIELDS["similarity"]
    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


class Similarities(RootModel[list[float]]):
    """A cosine a sentence."""


async def similarity(context: RequestContext) -> tuple[bytes, bytes]:
    request = await context.parse(SimilarityRequest)
    check_texts([request.inputs.source_sentence], "inputs", ".source_sentence")
    check_texts(request.inputs.sentences, "inputs", ".sentences")
    parameters = request.parameters or SimilarityParameters()
    encoded = await context.tokenize(
        [request.inputs.source_sentence, *request.inputs.sentences],
        TokenizeOptions(truncate=parameters.truncate, direction=parameters.truncation_direction),
        task=parameters.task,
        prompt_name=parameters.prompt_name,
    )
    result = await context.run(encoded)
    return JSON, orjson.dumps(result.vectors[1:] @ result.vectors[0], option=orjson.OPT_SERIALIZE_NUMPY)
