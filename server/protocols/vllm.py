"""vLLM's protocol: scores of pairs, classes of texts, and `/pooling`: any of the model's vectors, or its classes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BaseModel, Field

from embert.engine import Task, TaskOutput
from embert.engine.heads.scores import scores
from embert.engine.tokenization.encoded import TokenizeOptions
from embert.server.http.errors import Invalid, TaskMissing
from embert.server.protocols.fields import FIELDS
from embert.server.protocols.openai import Usage, check_foreign_ids, read_input_type
from embert.server.protocols.ranking import activation, join_rows, json_numbers, score_pairs
from embert.server.protocols.request_context import JSON, RequestContext
from embert.server.protocols.rerank import PairFields
from embert.server.protocols.serialization import Pauses, base64_pieces, compute, floats_pieces, join
from embert.server.registry.model_handle import Capability, ModelHandle
from embert.server.request.request_body import (
    TEXT_OR_IDS,
    Direction,
    InputForm,
    InputForms,
    InputType,
    RequestBody,
    TextList,
    TextOrIds,
)

Floats = npt.NDArray[np.float32]
TextOrTexts = str | TextList
_TEXTS = InputForm("a string or a list of strings")
_PAIRED = InputForm("a string or a list of strings", shortest=0)
# vLLM's names for first and second texts, the preferred ones first.
_FIELDS = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
_CAPABILITIES = {
    "embed": Capability(Task.EMBED),
    "token_embed": Capability(needs_one=Task.TOKENS | Task.MULTI),
    "classify": Capability(Task.CLASSIFY),
    "token_classify": Capability(Task.TOKEN_CLASSES),
}
_ANY = Task.EMBED | Task.TOKENS | Task.CLASSIFY | Task.MULTI | Task.TOKEN_CLASSES
_DTYPES = {"float32": "<f4", "float16": "<f2"}


class ScoreRequest(PairFields):
    """`POST /score`: one text with each of several, or two lists pair by pair, under one of four pairs of names."""

    known = FIELDS["score"]
    text_limit: ClassVar[str] = "max_client_documents"
    strings_per_text: ClassVar[int] = 2
    input_forms: ClassVar[InputForms] = {name: _PAIRED for pair in _FIELDS for name in pair}

    model: str | None = Field(None, description="The served model's name or id.")
    queries: TextOrTexts | None = Field(None, description="First texts.")
    documents: TextOrTexts | None = Field(None, description="Second texts.")
    items: TextOrTexts | None = Field(None, description="Second texts.")
    text_1: TextOrTexts | None = Field(None, description="First texts.")
    text_2: TextOrTexts | None = Field(None, description="Second texts.")
    data_1: TextOrTexts | None = Field(None, description="First texts.")
    data_2: TextOrTexts | None = Field(None, description="Second texts.")


class PairScore(BaseModel):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class TokenUsage(Usage):
    """Tokens read."""

    completion_tokens: int


class Scores(BaseModel):
    """Response of `/score`, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: TokenUsage


class ClassifyRequest(RequestBody):
    """`POST /classify`."""

    known = FIELDS["classify"]
    input_forms: ClassVar[InputForms] = {"input": _TEXTS}

    input: TextOrTexts = Field(description="A text, or texts.")
    model: str | None = Field(None, description="The served model's name or id.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Cut texts to this many tokens; -1: to the model's limit. Default: --auto-truncate."
    )
    truncation_side: Direction | None = Field(None, description="The end of a text that is cut off. Default: right.")
    use_activation: bool | None = Field(None, description="false: `probs` are the model's logits.")
    priority: int | None = Field(None, description="Above 0: as `X-Priority: bulk`.")


class Class(BaseModel):
    """The best label of a text, and the probabilities of all, in the order of their numbers."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(BaseModel):
    """Response of `/classify`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Class]
    usage: TokenUsage


async def score(context: RequestContext) -> tuple[bytes, bytes]:
    request = await context.parse(ScoreRequest)
    handle = context.choose(request.model, priority=request.priority)
    params, firsts, seconds = _texts(request)
    logits, encoded = await score_pairs(
        context,
        firsts,
        seconds,
        options=request.tokenize_options(request.cuts, request.truncation_side, params),
    )
    function = activation(handle.scorer, raw=request.use_activation is False)
    numbers = json_numbers(scores(logits[:, None], function)[:, 0])
    rows = await join_rows(b'{"index":%d,"object":"score","score":%b}' % row for row in enumerate(numbers))
    head, tail = _list("score", handle.name, encoded.tokens, completion_tokens=0)
    return JSON, await join([head, rows, tail])


def _texts(request: ScoreRequest) -> tuple[tuple[str, str], list[str], list[str]]:
    """The names of the two fields that the request has, and their texts."""
    names = {name for pair in _FIELDS for name in pair if getattr(request, name) is not None}
    params = next((pair for pair in _FIELDS if names == {*pair}), None)
    if params is None:
        choices = ", ".join(f"`{first}` and `{second}`" for first, second in _FIELDS)
        has = ", ".join(f"`{name}`" for name in sorted(names)) or "none of them"
        raise Invalid(f"is required with `documents`: one of {choices}; the request has {has}", "queries")
    values = (getattr(request, name) for name in params)
    firsts, seconds = ([value] if isinstance(value, str) else value for value in values)
    if len(firsts) > 1 and len(firsts) != len(seconds):
        raise Invalid(
            f"has {len(firsts)} texts and `{params[1]}` has {len(seconds)}; "
            "the former must have one text, or as many as the latter",
            params[0],
        )
    return params, firsts, seconds


async def classify(context: RequestContext) -> tuple[bytes, bytes]:
    request = await context.parse(ClassifyRequest)
    handle = context.choose(request.model, priority=request.priority)
    limit = request.truncate_prompt_tokens
    encoded = await context.tokenize(
        request.input,
        TokenizeOptions(
            truncate=None if limit is None else True,
            direction=request.truncation_side,
            limit=handle.check_limit(limit),
            param="input",
        ),
    )
    result = await context.run(encoded, Task.CLASSIFY)
    classifier = handle.classifier
    probabilities = scores(result.vectors, activation(classifier, raw=request.use_activation is False))
    rows = await join_rows(_class_rows(result.vectors, probabilities, classifier.labels))
    head, tail = _list("classify", handle.name, encoded.tokens, completion_tokens=0)
    return JSON, await join([head, rows, tail])


def _class_rows(
    logits: npt.NDArray[np.float32], probabilities: npt.NDArray[np.float32], labels: tuple[str, ...]
) -> Iterator[bytes]:
    """A row a text. Logits say which label is best: the probabilities of two may both be 1."""
    names = [orjson.dumps(label) for label in labels]
    for index, best in enumerate(logits.argmax(axis=1).tolist()):
        probs = orjson.dumps(probabilities[index], option=orjson.OPT_SERIALIZE_NUMPY)
        yield b'{"index":%d,"label":%b,"probs":%b,"num_classes":%d}' % (index, names[best], probs, len(labels))


def _list(kind: str, model: str, tokens: int, **more_usage: int) -> tuple[bytes, bytes]:
    """Returns what comes before and after the items of a list."""
    metadata = {"id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": model}
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, **more_usage}
    return orjson.dumps(metadata)[:-1] + b',"data":[', b'],"usage":%b}' % orjson.dumps(usage)


# --- /pooling ---


class PoolingRequest(RequestBody):
    """`POST /pooling`: vLLM's fields, and one extension."""

    known = FIELDS["pooling"]
    input_forms: ClassVar[InputForms] = {"input": TEXT_OR_IDS}

    input: TextOrIds = Field(description="A text, texts, token ids of one text, or token ids of several.")
    model: str | None = Field(None, description="The served model's name or id.")
    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = Field(
        None, description="Default: the first of embed, classify, token_embed and token_classify that the model has."
    )
    encoding_format: Literal["float", "base64"] = Field("float", description="base64 is little-endian.")
    embed_dtype: Literal["float32", "float16"] = Field("float32", description="Type of the numbers in base64.")
    dimensions: int | None = Field(None, description="Cut the vectors of `embed` to this many numbers.")
    use_activation: bool | None = Field(
        None, description="Vectors of length 1 instead of raw ones, classes' scores instead of logits. Default: true."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        None, description="Cut texts to this many tokens; -1: to the model's limit. Default: --auto-truncate."
    )
    truncation_side: Literal["right", "left"] | None = Field(
        None, description="The end that is cut off. Default: the model's, mostly right."
    )
    priority: int | None = Field(None, description="Above 0: as `X-Priority: bulk`.")
    input_type: InputType | None = Field(
        None,
        description="Role of the texts: chooses one of the model's prompts or adapters. To a model of late "
        "interaction they are documents by default.",
    )


class Pooling(BaseModel):
    """One text's vector or classes; its token vectors or their classes; or either as base64."""

    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str


class PoolingList(BaseModel):
    """Response of `/pooling`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Pooling]
    usage: Usage


async def pooling(context: RequestContext) -> tuple[bytes, bytes]:
    request = await context.parse(PoolingRequest)
    capability = None if request.task is None else _CAPABILITIES[request.task]
    handle = context.choose(request.model, capability=capability, priority=request.priority)
    check_foreign_ids(context, request.input, request.model)
    task = _task(handle, request)
    is_query = handle.is_query(request.input_type, task)
    _check_fields(request, task)
    prompt_name = None
    if request.input_type is not None and is_query is None and task == Task.EMBED:
        prompt_name, _ = read_input_type(handle, request.input_type, request.input)
    limit, activates = request.truncate_prompt_tokens, request.use_activation is not False
    dimensions = handle.check_dimensions(request.dimensions)
    encoded = await context.tokenize(
        request.input,
        TokenizeOptions(
            truncate=None if limit is None else True,
            direction=request.truncation_side,
            limit=handle.check_limit(limit, is_query=is_query),
            is_query=is_query,
            param="input",
        ),
        prompt_name=prompt_name,
    )
    result = await context.run(encoded, task, dimensions=dimensions, normalize=activates)
    rows = result.rows[task]
    texts = await compute(rows.values.size, _split_by_text, handle, task, rows, activates=activates)
    return await _write(context, request, texts, encoded.tokens)


def _task(handle: ModelHandle, request: PoolingRequest) -> Task:
    """The task. Raises TaskMissing where the model does not have it."""
    has = handle.model.tasks
    of_tokens = Task.MULTI if Task.MULTI in has or Task.TOKENS not in has else Task.TOKENS
    by_name = {
        "embed": Task.EMBED,
        "classify": Task.CLASSIFY,
        "token_embed": of_tokens,
        "token_classify": Task.TOKEN_CLASSES,
    }
    if request.task is not None:
        handle.check_tasks(by_name[request.task])
        return by_name[request.task]
    task = next((task for task in by_name.values() if task in has), None)
    if task is None:
        names = ", ".join(handle.task_names)
        others = handle.elsewhere(Capability(needs_one=_ANY))
        raise TaskMissing(f"{handle.name} has no task for /pooling; it has {names}{others}")
    return task


def _check_fields(request: PoolingRequest, task: Task) -> None:
    """Raises Invalid for options that the task does not have."""
    if request.dimensions is not None and task != Task.EMBED:
        raise Invalid("is for the task embed", "dimensions")
    if request.use_activation is False and task == Task.MULTI:
        raise Invalid("must be true for multi-vectors, which have length 1", "use_activation")


def _split_by_text(handle: ModelHandle, task: Task, rows: TaskOutput, *, activates: bool) -> list[Floats]:
    """The numbers of each text: [columns], or [tokens, columns]."""
    values = rows.values
    if task == Task.CLASSIFY:
        values = scores(values, activation(handle.classifier, raw=not activates))
    if task in (Task.EMBED, Task.CLASSIFY):
        return list(values)
    if task == Task.TOKEN_CLASSES and activates:
        values = scores(values, "softmax")
    if task == Task.TOKENS and activates:
        values = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), np.float32(1e-12))
    return np.split(values, rows.offsets[1:-1])


# --- writing ---


async def _write(
    context: RequestContext, request: PoolingRequest, texts: list[Floats], tokens: int
) -> tuple[bytes, bytes]:
    head, tail = _list("pool", context.handle.name, tokens)
    pieces = [head]
    pauses = Pauses()
    for index, rows in enumerate(texts):
        pieces.append(b'%b{"index":%d,"object":"pooling","data":' % (b"," if index else b"", index))
        if request.encoding_format == "base64":
            pieces += await base64_pieces(rows, _DTYPES[request.embed_dtype])
        else:
            pieces += await floats_pieces(rows)
        pieces.append(b"}")
        await pauses.after(rows.size)
    pieces.append(tail)
    return JSON, await join(pieces)
