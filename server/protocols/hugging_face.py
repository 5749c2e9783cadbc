"""Hugging Face's pipelines: entities of texts, and zero-shot classes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
import orjson
from pydantic import BaseModel, Field, RootModel

from embert.engine import Task
from embert.engine.entities import DEFAULT_IGNORED, Aggregation, Entity, EntityOptions, entities_of
from embert.engine.heads.zero_shot import (
    MOST_LABELS,
    TEMPLATE,
    check_labels,
    hypotheses,
    split_labels,
    zero_shot_labels,
)
from embert.engine.tokenization.encoded import Chunks, TokenizeOptions, finish
from embert.server.http.errors import PayloadTooLarge
from embert.server.protocols.fields import FIELDS
from embert.server.protocols.ranking import join_rows
from embert.server.protocols.request_context import JSON, RequestContext
from embert.server.protocols.serialization import join
from embert.server.registry.model_handle import Capability
from embert.server.registry.tokenizing import TextPairs, check_texts
from embert.server.request.request_body import (
    LOWER_CASE,
    MODELS_DIRECTION,
    Direction,
    InputForm,
    InputForms,
    RequestBody,
    TextList,
)

_TEXTS = InputForm("a string or a list of strings")
_INLINE_TOKENS = 1024  # entities of up to this many tokens are made on the event loop: about 2 ms
_BYTES_A_CHARACTER = 4  # at most, in UTF-8
_BYTES_A_SCORE = 24  # in JSON


# --- entities ---


class TokenClassifyRequest(RequestBody):
    """`POST /token_classify`: the fields of transformers' TokenClassificationPipeline."""

    known = FIELDS["token_classify"]
    input_forms: ClassVar[InputForms] = {"inputs": _TEXTS}

    inputs: str | TextList = Field(description="A text, or texts.")
    aggregation_strategy: Annotated[Aggregation, LOWER_CASE] = Field(
        "none", description="none: an entity for each token; the others join tokens, as transformers documents them."
    )
    ignore_labels: TextList = Field([*DEFAULT_IGNORED], description="Labels without an entity.")
    stride: int | None = Field(
        None,
        ge=0,
        description="Read a long text in sequences that share this number of tokens. For any strategy but none.",
    )
    truncate: bool | None = Field(
        None, description="Without `stride`: cut texts that are too long. Default: the server's --auto-truncate."
    )
    truncation_direction: Direction = Field(
        MODELS_DIRECTION, description="The end that is cut off. Default: the model's, mostly right."
    )


class TokenEntity(BaseModel):
    """An entity: of one token, with `entity` and `index`, or of several, with `entity_group`."""

    entity: str | None = None
    entity_group: str | None = None
    score: float
    index: int | None = None
    word: str
    start: int
    end: int


class Entities(RootModel[list[TokenEntity] | list[list[TokenEntity]]]):
    """The entities of one text, or of each of several."""


async def token_classify(context: RequestContext) -> tuple[bytes, bytes]:
    handle = context.handle
    request = await context.parse(TokenClassifyRequest)
    strategy = request.aggregation_strategy
    if "aggregation_strategy" not in request.model_fields_set and context.has_agent(b"@huggingface/inference"):
        strategy = "simple"  # the default of the API that this client is for; it takes no entity without `entity_group`
    options = EntityOptions(strategy, frozenset(request.ignore_labels), request.stride)
    options.check()
    classifier = handle.token_classifier
    spans = await context.tokenize_spans(
        request.inputs,
        TokenizeOptions(truncate=request.truncate, direction=request.truncation_direction),
        stride=request.stride,
    )
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    # A token that the vocabulary lacks has all characters of its word, in each sequence that it is in.
    context.hold(_BYTES_A_CHARACTER * int((spans.stops - spans.starts).sum()), "the response")
    rows = await context.logits_of_tokens(spans.encoded)
    logits = np.split(rows.values, rows.offsets[1:-1])
    entities = entities_of(texts, spans, logits, classifier.labels, handle.tokenizer, options)

    def write() -> Chunks[bytes]:
        pieces: list[bytes] = []
        for each in entities:
            if each is not None:
                pieces.append(orjson.dumps([_entity_fields(entity) for entity in each]))
            yield len(pieces)
        return b",".join(pieces)

    if spans.encoded.tokens <= _INLINE_TOKENS:
        payload = finish(write())
    else:
        check = partial(handle.check_progress, context.options, lambda _: None)
        payload = await handle.tokenizer_pool.run(write(), spans.encoded.tokens, context.receive, check)
    return JSON, payload if isinstance(request.inputs, str) else b"[%b]" % payload


def _entity_fields(entity: Entity) -> dict[str, Any]:
    if entity.index is None:
        fields: dict[str, Any] = {"entity_group": entity.label, "score": entity.score}
    else:
        fields = {"entity": entity.label, "score": entity.score, "index": entity.index}
    return {**fields, "word": entity.word, "start": entity.start, "end": entity.end}


# --- zero-shot classes ---


class ZeroShotRequest(RequestBody):
    """`POST /zero_shot`: the fields of transformers' ZeroShotClassificationPipeline."""

    known = FIELDS["zero_shot"]
    text_limit: ClassVar[str] = "max_client_documents"
    input_forms: ClassVar[InputForms] = {
        "inputs": _TEXTS,
        "candidate_labels": InputForm("a list of strings, or one string with commas between labels", most=MOST_LABELS),
    }

    inputs: str | TextList = Field(description="A text, or texts.")
    candidate_labels: str | TextList = Field(
        description=f"At most {MOST_LABELS} labels, in a list or with commas between them."
    )
    hypothesis_template: str = Field(
        TEMPLATE,
        description="Sentence that a label makes of a text, with {} for the label.",
        json_schema_extra={"pattern": r"^[^{}]*\{\}[^{}]*$"},
    )
    multi_label: bool = Field(
        False, description="Score each label by itself: entailment against contradiction. Else scores add up to 1."
    )
    truncate: bool | None = Field(
        None, description="Cut texts that are too long next to a hypothesis. Default: the server's --auto-truncate."
    )
    truncation_direction: Direction = Field(
        MODELS_DIRECTION, description="The end of a text that is cut off. Default: the model's, mostly right."
    )


class ZeroShotClasses(BaseModel):
    """The labels of one text, best first."""

    sequence: str
    labels: list[str]
    scores: list[float]


class ZeroShotLabel(BaseModel):
    """One label of a text, for Hugging Face's own clients."""

    label: str
    score: float


class ZeroShotResponse(RootModel[ZeroShotClasses | list[ZeroShotClasses] | list[ZeroShotLabel]]):
    """The labels of one text, or of each of several; to huggingface_hub, which sends one text, a list of its labels."""


async def zero_shot(context: RequestContext) -> tuple[bytes, bytes]:
    handle = context.handle
    request = await context.parse(ZeroShotRequest)
    handle.check(Capability(Task.CLASSIFY, entails=True))
    entailment = handle.classifier.entailment
    assert entailment is not None  # noqa: S101 - see above
    labels = request.candidate_labels
    if isinstance(labels, str):
        labels = split_labels(labels, "candidate_labels")
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    check_texts(texts, "inputs")
    check_labels(labels, "candidate_labels")
    handle.limits.check_label_pairs(len(texts), len(labels), "candidate_labels")
    _check_hypotheses(request.hypothesis_template, labels, handle.config.payload_limit)
    seconds = hypotheses(request.hypothesis_template, labels)
    each = len(orjson.dumps(labels)) + _BYTES_A_SCORE * len(labels)
    context.hold(sum(map(len, texts)) + len(texts) * each, "the response")
    firsts = texts if len(texts) == 1 else [text for text in texts for _ in labels]
    encoded = await context.tokenize_pairs(
        TextPairs(firsts, seconds * len(texts)),
        TokenizeOptions(
            truncate=request.truncate,
            direction=request.truncation_direction,
            second_param="candidate_labels",
            only_first=True,
        ),
    )
    logits = (await context.run(encoded, Task.CLASSIFY)).vectors
    results = []
    for index in range(len(texts)):
        rows = logits[index * len(labels) : (index + 1) * len(labels)]
        results.append(zero_shot_labels(rows, labels, entailment, multi_label=request.multi_label))
    if isinstance(request.inputs, str) and context.has_agent(b"hf_hub/"):
        return JSON, orjson.dumps(results[0])
    items = await join_rows(
        orjson.dumps(
            {"sequence": text, "labels": [each.label for each in result], "scores": [each.score for each in result]}
        )
        for text, result in zip(texts, results, strict=True)
    )
    return JSON, items if isinstance(request.inputs, str) else await join([b"[", items, b"]"])


def _check_hypotheses(template: str, labels: Sequence[str], limit: int) -> None:
    """Raise PayloadTooLarge for hypotheses that together are longer than a body may be."""
    characters = len(template) * len(labels) + sum(map(len, labels))
    if characters > limit:
        raise PayloadTooLarge(
            f"makes hypotheses of {characters} characters", "hypothesis_template", limit=limit, option="--payload-limit"
        )
