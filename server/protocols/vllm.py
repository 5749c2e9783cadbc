"""vLLM's routes of pairs and classes, which are written as OpenAI's are."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BaseModel, Field

from embert.engine import Task
from embert.engine.heads.scores import scores
from embert.engine.tokenization.encoded import TokenizeOptions
from embert.server.http.errors import Invalid
from embert.server.protocols.fields import FIELDS
from embert.server.protocols.ranking import activation, joined, json_numbers, score_pairs
from embert.server.protocols.rerank import PairFields
from embert.server.request.request_body import Direction, InputForm, InputForms, RequestBody, TextList
from embert.server.request.request_context import JSON, RequestContext

__all__ = ["Classes", "ClassifyRequest", "ScoreRequest", "Scores", "classify", "score"]

TextOrTexts = str | TextList
_TEXTS = InputForm("a string or a list of strings")
_PAIRED = InputForm("a string or a list of strings", shortest=0)
# What vLLM calls first and second texts, by the names that its docs begin with.
_FIELDS = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))


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


class TokenUsage(BaseModel):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class Scores(BaseModel):
    """Answer of `/score`, in the order of the pairs."""

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
        None, ge=-1, description="Cut texts to this many tokens; -1: to what the model takes. Default: --auto-truncate."
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
    """Answer of `/classify`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Class]
    usage: TokenUsage


async def score(context: RequestContext) -> tuple[bytes, bytes]:
    """`POST /score`."""
    request = await context.parse(ScoreRequest)
    handle = context.choose(request.model)
    params, firsts, seconds = _texts(request)
    if request.priority is not None and request.priority > 0:
        context.give_way()
    logits, encoded = await score_pairs(
        context,
        firsts,
        seconds,
        options=request.tokenize_options(request.cuts, request.truncation_side, params),
    )
    function = activation(handle.served.classifier, raw=request.use_activation is False)
    numbers = json_numbers(scores(logits[:, None], function)[:, 0])
    rows = await joined(b'{"index":%d,"object":"score","score":%b}' % row for row in enumerate(numbers))
    return JSON, _list(b"score", handle.served.name, rows, encoded.tokens)


def _texts(request: ScoreRequest) -> tuple[tuple[str, str], list[str], list[str]]:
    """The names of the two fields that the request has, and their texts."""
    names = {name for pair in _FIELDS for name in pair if getattr(request, name) is not None}
    params = next((pair for pair in _FIELDS if names == {*pair}), None)
    if params is None:
        choices = ", ".join(f"`{first}` and `{second}`" for first, second in _FIELDS)
        has = ", ".join(f"`{name}`" for name in sorted(names)) or "none of them"
        raise Invalid(f"`queries` is required with `documents`: one of {choices}; the request has {has}", "queries")
    values = (getattr(request, name) for name in params)
    firsts, seconds = ([value] if isinstance(value, str) else value for value in values)
    if len(firsts) > 1 and len(firsts) != len(seconds):
        raise Invalid(
            f"`{params[0]}` has {len(firsts)} texts and `{params[1]}` has {len(seconds)}; "
            "the former must have one text, or as many as the latter",
            params[0],
        )
    return params, firsts, seconds


async def classify(context: RequestContext) -> tuple[bytes, bytes]:
    """`POST /classify`."""
    request = await context.parse(ClassifyRequest)
    handle = context.choose(request.model)
    limit = request.truncate_prompt_tokens
    if request.priority is not None and request.priority > 0:
        context.give_way()
    encoded = await context.tokenize(
        request.input,
        TokenizeOptions(
            truncate=None if limit is None else True,
            direction=request.truncation_side,
            limit=handle.check_limit(limit),
            param="input",
        ),
    )
    answer = await context.run(encoded, Task.CLASSIFY)
    classifier = handle.served.classifier
    probabilities = scores(answer.vectors, activation(classifier, raw=request.use_activation is False))
    rows = await joined(_class_rows(answer.vectors, probabilities, classifier.labels))
    return JSON, _list(b"classify", handle.served.name, rows, encoded.tokens)


def _class_rows(
    logits: npt.NDArray[np.float32], probabilities: npt.NDArray[np.float32], labels: tuple[str, ...]
) -> Iterator[bytes]:
    """A row a text. Logits say which label is best: the probabilities of two may both be 1."""
    written = [orjson.dumps(label) for label in labels]
    for index, best in enumerate(logits.argmax(axis=1).tolist()):
        probs = orjson.dumps(probabilities[index], option=orjson.OPT_SERIALIZE_NUMPY)
        yield b'{"index":%d,"label":%b,"probs":%b,"num_classes":%d}' % (index, written[best], probs, len(labels))


def _list(kind: bytes, model: str, rows: bytes, tokens: int) -> bytes:
    return (
        b'{"id":"%b-%b","object":"list","created":%d,"model":%b,"data":[%b],'
        b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":0}}'
    ) % (kind, uuid.uuid4().hex.encode(), int(time.time()), orjson.dumps(model), rows, tokens, tokens)
