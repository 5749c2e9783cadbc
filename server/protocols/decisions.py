"""Decisions: questions about a text, and a probability for each of their options, as OpenAI and TypeSafe have them.

`/v1/decisions` has OpenAI's form, which vLLM has too; `/v1/systemone` TypeSafe's, in which servers of open models are
asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import orjson
from pydantic import BaseModel, Field, WithJsonSchema

from embert.engine import Decision, Option, Question
from embert.engine.decisions import (
    MOST_QUESTIONS,
    check_count,
    check_questions,
    decision_tasks,
    pair_characters,
    pair_count,
    read_decisions,
    second_texts,
)
from embert.engine.tasks import Task
from embert.engine.tokenization.encoded import TokenizeOptions
from embert.server.http.errors import Invalid, PayloadTooLarge, describe, describe_name
from embert.server.protocols.fields import FIELDS
from embert.server.protocols.ranking import join_rows
from embert.server.protocols.request_context import JSON, RequestContext
from embert.server.registry.model_handle import Capability
from embert.server.registry.tokenizing import TextPairs, check_texts
from embert.server.request.request_body import RequestBody, RequestObject, validate_part

Json = str | dict[str, Any] | list[Any]
_BYTES_AN_OPTION = 64  # of a response, in addition to the option's text
_STRINGS = 16  # of a body, for each of --max-client-documents
_LABEL_MASS = (
    "An extension: return each question's `label_mass` too, the share of its options in the probability of all tokens. "
    "Of language models."
)
_DECIDES = Capability(decides=True)
_OPENAI_ROLES = {"type": "message", "role": "user"}
_PARTS = {"input_text": "text", "input_json": "data"}

# Values that are checked below, not by pydantic, which takes microseconds for each object: a body may have many.
_JSON = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "array"}]}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}


def _objects(**fields: Any) -> dict[str, Any]:
    """The schema of a list of objects with these fields."""
    item = {"type": "object", "properties": {**fields, "description": {"type": "string"}}, "required": [*fields]}
    return {"anyOf": [{"type": "array", "items": item}, {"type": "null"}]}


async def _decide(
    context: RequestContext, state: str, questions: Sequence[Question], param: str, *, label_mass: bool
) -> tuple[list[Decision], int]:
    """The decisions, and the number of tokens that were read. `param` is the field of the state."""
    handle = context.handle
    handle.check(_DECIDES)
    tasks = decision_tasks(handle.model, label_mass=label_mass)
    check_texts([state], param)
    check_questions(handle.model, questions)
    handle.limits.check_documents(pair_count(handle.model, questions), "questions")
    characters, limit = pair_characters(handle.model, questions), handle.config.payload_limit
    if characters > limit:
        reason = f"makes texts of {characters} characters, with its instructions before each option"
        raise PayloadTooLarge(reason, "questions", limit=limit, option="--payload-limit")
    texts = second_texts(handle.model, questions)
    encoded = await context.tokenize_pairs(
        TextPairs([state], texts), TokenizeOptions(param=param, second_param="questions", only_first=True)
    )
    context.hold(
        sum(_BYTES_AN_OPTION + len(each.text) for asked in questions for each in asked.options), "the response"
    )
    rows = (await context.run(encoded, tasks)).rows
    masses = rows.pop(Task.LABEL_MASS, None)
    (main,) = rows.values()
    mass = None if masses is None else masses.values
    return read_decisions(handle.model, questions, main.values, mass), encoded.tokens


def _writable(value: Json) -> Json:
    """The value, or its text where it has an integer of more than 64 bits."""
    try:
        orjson.dumps(value)
    except TypeError:
        return _text_of(value, "")
    return value


def _text_of(value: Any, path: str) -> str:
    """A text, or the text of an object or a list. Raises Invalid for another value of the field at `path`."""
    if isinstance(value, str):
        return value
    if not isinstance(value, (dict, list)):
        raise Invalid("must be a string, an object or a list", path, value=describe(value))
    try:
        return msgspec.json.format(orjson.dumps(value), indent=0).decode()  # a space after each comma and colon
    except TypeError:  # an integer of more than 64 bits
        return json.dumps(value, ensure_ascii=False)


def _items(value: Any, path: str, known: AbstractSet[str]) -> list[dict[str, Any]]:
    """The objects of a list at `path`. Raises Invalid for another value, and for fields that are not `known`."""
    if not isinstance(value, list):
        raise Invalid("must be a list", path, value=describe(value))
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise Invalid("must be an object", f"{path}[{index}]", value=describe(item))
        if not item.keys() <= known:
            other = describe_name(min(item.keys() - known))
            raise Invalid(f"has the field {other}, which is not known", f"{path}[{index}]")
    return value


def _string(fields: Mapping[str, Any], name: str, path: str, *, optional: bool = False) -> str:
    """A string among the fields of the object at `path`. Raises Invalid."""
    value = fields.get(name)
    if isinstance(value, str):
        return value
    if value is None and (optional or name not in fields):
        if optional:
            return ""
        raise Invalid("is required", f"{path}.{name}")
    raise Invalid("must be a string", f"{path}.{name}", value=describe(value))


def _check_options(context: RequestContext, lists: Iterable[Any]) -> None:
    """Raises PayloadTooLarge for too many options of all questions, before anything is made of them."""
    options = sum(len(each) for each in lists if isinstance(each, (list, dict)))
    context.handle.limits.check_documents(options, "questions")


# --- OpenAI ---


class DecisionQuestion(RequestObject):
    """A question. `choices` are for the type choice, `levels` for score."""

    type: Literal["predicate", "choice", "score"]
    name: str | None = Field(None, description="Name of the answer.")
    instructions: Annotated[Any, WithJsonSchema(_TEXTS)] = Field(
        description="A statement, or a question, about the input: a string, or parts as those of messages."
    )
    choices: Annotated[Any, WithJsonSchema(_objects(value={"anyOf": [{"type": "string"}, {"type": "boolean"}]}))] = (
        Field(None, description="2 to 255, each with a value.")
    )
    levels: Annotated[Any, WithJsonSchema(_objects(label={"type": "string"}))] = Field(
        None, description="2 to 10, the lowest one first."
    )


class DecisionsRequest(RequestBody):
    """`POST /v1/decisions`."""

    known = FIELDS["decisions"]
    text_limit: ClassVar[str] = "max_client_documents"
    strings_per_text: ClassVar[int] = _STRINGS

    input: Annotated[Any, WithJsonSchema(_TEXTS)] = Field(
        description="The text that the questions are about, or messages of a user with it."
    )
    questions: Annotated[
        Any,
        WithJsonSchema(
            {
                "type": "array",
                "items": DecisionQuestion.model_json_schema(),
                "minItems": 1,
                "maxItems": MOST_QUESTIONS,
            }
        ),
    ] = Field(description="1 to 200 questions.")
    model: str | None = Field(None, description="The served model's name or id.")
    label_mass: bool = Field(False, description=_LABEL_MASS)


class ChoiceProbability(BaseModel):
    """The probability of one choice."""

    value: str | bool
    probability: float


class LevelProbability(BaseModel):
    """The probability of one level."""

    value: int
    label: str
    probability: float


class DecisionAnswer(BaseModel):
    """The answer to one question: `probability` of a predicate; `choice` or `score` and the rest of the others."""

    type: Literal["predicate", "choice", "score"]
    name: str | None
    probability: float | None = None
    choice: str | bool | None = None
    score: float | None = None
    probabilities: list[ChoiceProbability | LevelProbability] | None = None
    confidence: float | None = None
    label_mass: float | None = None


class DecisionUsage(BaseModel):
    """Tokens read: those of the input count once for each question."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Decisions(BaseModel):
    """Response of `/v1/decisions`, in the order of the questions."""

    model: str
    answers: list[DecisionAnswer]
    usage: DecisionUsage


async def decisions(context: RequestContext) -> tuple[bytes, bytes]:
    request = await context.parse(DecisionsRequest)
    handle = context.choose(request.model)
    if isinstance(request.questions, list):
        objects = [each for each in request.questions if isinstance(each, dict)]
        _check_options(context, (each.get(name) for each in objects for name in ("choices", "levels")))
    state, questions = read_decisions_request(request)
    results, tokens = await _decide(context, state, questions, "input", label_mass=request.label_mass)
    rows = await join_rows(orjson.dumps(each) for each in answers(request, results))
    usage = {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens,
    }
    return JSON, b'{"model":%b,"answers":[%b],"usage":%b}' % (
        orjson.dumps(handle.name),
        rows,
        orjson.dumps(usage),
    )


def read_decisions_request(request: DecisionsRequest) -> tuple[str, list[Question]]:
    """The text of a request and its questions. Raises Invalid or InputError."""
    if not isinstance(request.questions, list):
        raise Invalid("must be a list", "questions", value=describe(request.questions))
    check_count(len(request.questions))
    questions = [_question(item, f"questions[{index}]") for index, item in enumerate(request.questions)]
    return _read_input(request.input), questions


def _read_input(messages: Any) -> str:
    """The text of all messages. Raises Invalid for other items than messages of a user."""
    if isinstance(messages, str):
        return messages
    if not isinstance(messages, list):
        raise Invalid("must be a string or a list of messages", "input", value=describe(messages))
    texts = []
    for index, message in enumerate(messages):
        path = f"input[{index}]"
        if not isinstance(message, dict):
            raise Invalid("must be an object", path, value=describe(message))
        for name, role in _OPENAI_ROLES.items():
            value = message.get(name, "message" if name == "type" else None)
            if value != role:
                shown = describe_name(value) if isinstance(value, str) else describe(value)
                raise Invalid(f"must be {role}: models read texts only, and no tools", f"{path}.{name}", value=shown)
        if message.get("content") is None:
            raise Invalid("is required", f"{path}.content")
        texts.append(_read_parts(message["content"], f"{path}.content"))
    return "\n\n".join(texts)


def _read_parts(parts: Any, path: str) -> str:
    """The text of the parts of the field at `path`. Raises Invalid for images and other types."""
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise Invalid("must be a string or a list of parts", path, value=describe(parts))
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        name = _PARTS.get(kind) if isinstance(kind, str) else None
        if name is None:
            reason = "must be input_text or input_json: models read texts only, and no images"
            shown = describe_name(kind) if isinstance(kind, str) else describe(kind)
            raise Invalid(reason, f"{path}[{index}].type", value=shown)
        own = f"{path}[{index}]"
        texts.append(_string(part, name, own) if name == "text" else _text_of(part.get(name), f"{own}.{name}"))
    return "\n\n".join(texts)


def _question(value: Any, path: str) -> Question:
    """The question at `path`. Raises Invalid, also for the options of another type."""
    fields = validate_part(DecisionQuestion, value, path)
    instructions = _read_parts(fields.instructions, f"{path}.instructions")
    field, text = _OPTIONS.get(fields.type, ("", ""))
    for name in ("choices", "levels"):
        if (getattr(fields, name) is None) == (name == field):
            rule = "is required" if name == field else "must be absent"
            raise Invalid(f"{rule} in a question of type {fields.type}", f"{path}.{name}")
    if not field:
        return Question.predicate(instructions)
    own = f"{path}.{field}"
    items = _items(getattr(fields, field), own, {text, "description"})
    options = tuple(_option(option, text, f"{own}[{index}]") for index, option in enumerate(items))
    if fields.type == "choice" and len({(type(each["value"]), each["value"]) for each in items}) < len(items):
        raise Invalid("has two equal choices", own)
    return Question(fields.type, instructions, options, own)


_OPTIONS = {"choice": ("choices", "value"), "score": ("levels", "label")}  # fields of the options, and of their texts


def _option(fields: Mapping[str, Any], text: str, path: str) -> Option:
    value = fields.get(text)
    if text == "value" and not isinstance(value, str):
        if not isinstance(value, bool):
            raise Invalid("must be a string or a boolean", f"{path}.value", value=describe(value))
        fields = {**fields, text: str(value).lower()}
    return Option(_string(fields, text, path), _string(fields, "description", path, optional=True))


def answers(request: DecisionsRequest, results: Sequence[Decision]) -> Iterator[dict[str, Any]]:
    """The fields of each answer to a request that has been read."""
    for question, decision in zip(request.questions, results, strict=True):
        fields: dict[str, Any] = {"type": question["type"], "name": question.get("name")}
        if decision.label_mass is not None:
            fields["label_mass"] = decision.label_mass
        if question["type"] == "predicate":
            yield {**fields, "probability": decision.probabilities[0]}
            continue
        if question["type"] == "choice":
            values = [{"value": each["value"]} for each in question["choices"]]
            fields["choice"] = values[decision.index]["value"]
        else:
            values = [{"value": number, "label": each["label"]} for number, each in enumerate(question["levels"])]
            fields["score"] = decision.score
        probabilities = [
            {**each, "probability": probability}
            for each, probability in zip(values, decision.probabilities, strict=True)
        ]
        yield {**fields, "probabilities": probabilities, "confidence": decision.confidence}


# --- TypeSafe ---


class TypeSafeError(BaseModel):
    """TypeSafe's error: a sentence, or a list with the field."""

    detail: str | list[dict[str, Any]]


class SystemOneQuestion(RequestObject):
    """A question, with its criteria: of a choice its names, each with a description or null; the levels of a score;
    the descriptions of `true` and `false` of a noul."""

    type: Literal["noul", "choice", "score"]
    instructions: Annotated[Any, WithJsonSchema(_JSON)] = Field(
        None, description="A statement, or a question, about the state."
    )
    criteria: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "array"}, {"type": "null"}]})] = (
        None
    )


class SystemOneRequest(RequestBody):
    """`POST /v1/systemone`."""

    known = FIELDS["systemone"]
    text_limit: ClassVar[str] = "max_client_documents"
    strings_per_text: ClassVar[int] = _STRINGS

    state: Annotated[Any, WithJsonSchema(_JSON)] = Field(
        description="What the questions are about: a text, or JSON that is read as its text."
    )
    questions: Annotated[
        Any,
        WithJsonSchema(
            {
                "type": "object",
                "additionalProperties": SystemOneQuestion.model_json_schema(),
                "minProperties": 1,
                "maxProperties": MOST_QUESTIONS,
            }
        ),
    ] = Field(description="1 to 200 questions by name.")
    model: str | None = Field(None, description="The served model's name or id.")
    label_mass: bool = Field(False, description=_LABEL_MASS)


class SystemOneAnswer(BaseModel):
    """The answer to one question: `noul`, the probability of true; `choice` or `score` and the rest of the others."""

    type: Literal["noul", "choice", "score"]
    noul: float | None = None
    choice: str | None = None
    score: float | None = None
    legend: dict[str, Json] | None = None
    probabilities: dict[str, float] | None = None
    confidence: float | None = None


class SystemOneUsage(BaseModel):
    """Tokens read: those of the state count once for each question."""

    input_tokens: int
    output_tokens: int


class SystemOne(BaseModel):
    """Response of `/v1/systemone`."""

    model: str
    answers: dict[str, SystemOneAnswer]
    usage: SystemOneUsage
    diagnostics: dict[str, dict[str, float]] | None = None  # `label_mass` of each question


async def system_one(context: RequestContext) -> tuple[bytes, bytes]:
    request = await context.parse(SystemOneRequest)
    handle = context.choose(request.model)
    if isinstance(request.questions, dict):
        _check_options(context, (each.get("criteria") for each in request.questions.values() if isinstance(each, dict)))
    state, questions = read_system_one_request(request)
    results, tokens = await _decide(context, state, questions, "state", label_mass=request.label_mass)
    rows = await join_rows(
        b"%b:%b" % (orjson.dumps(name), orjson.dumps(answer))
        for name, answer in system_one_answers(request, questions, results)
    )
    masses = diagnostics_of(request, results)
    diagnostics = b',"diagnostics":%b' % orjson.dumps(masses) if masses else b""
    return JSON, b'{"model":%b,"answers":{%b},"usage":{"input_tokens":%d,"output_tokens":0}%b}' % (
        orjson.dumps(handle.name),
        rows,
        tokens,
        diagnostics,
    )


def read_system_one_request(request: SystemOneRequest) -> tuple[str, list[Question]]:
    """The text of a request and its questions. Raises Invalid or InputError."""
    if not isinstance(request.questions, dict):
        raise Invalid("must be an object", "questions", value=describe(request.questions))
    check_count(len(request.questions))
    questions = [_system_one_question(item, f"questions.{name}") for name, item in request.questions.items()]
    return _text_of(request.state, "state"), questions


def system_one_answers(
    request: SystemOneRequest, questions: Sequence[Question], results: Sequence[Decision]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each question and the fields of its answer."""
    for (name, fields), question, decision in zip(request.questions.items(), questions, results, strict=True):
        yield name, _system_one_answer(fields, question, decision)


def diagnostics_of(request: SystemOneRequest, results: Sequence[Decision]) -> dict[str, dict[str, float | None]]:
    """`label_mass` of each question, where it was read."""
    if not request.label_mass:
        return {}
    return {name: {"label_mass": each.label_mass} for name, each in zip(request.questions, results, strict=True)}


def _system_one_question(value: Any, path: str) -> Question:
    """The question at `path`. Raises Invalid, also for criteria of another type."""
    fields = validate_part(SystemOneQuestion, value, path)
    instructions = "" if fields.instructions is None else _text_of(fields.instructions, f"{path}.instructions")
    criteria, param = fields.criteria, f"{path}.criteria"
    if fields.type == "score":
        if not isinstance(criteria, list):
            raise Invalid("must be a list in a question of type score", param, value=describe(criteria))
        levels = [_text_of(each, f"{param}[{index}]") for index, each in enumerate(criteria)]
        return Question.score(instructions, levels, param=param)
    choices = {} if criteria is None and fields.type == "noul" else criteria
    if not isinstance(choices, dict):
        raise Invalid(f"must be an object in a question of type {fields.type}", param, value=describe(criteria))
    texts = {name: "" if each is None else _text_of(each, f"{param}.{name}") for name, each in choices.items()}
    if fields.type == "choice":
        return Question.choice(instructions, texts, param=param)
    if other := texts.keys() - {"true", "false"}:
        raise Invalid("may have true and false only", param, value=describe_name(min(other)))
    if not instructions and not any(texts.values()):
        raise Invalid("is required in a noul without criteria", f"{path}.instructions")
    return Question.predicate(instructions, yes=texts.get("true", ""), no=texts.get("false", ""), param=param)


def _system_one_answer(fields: Mapping[str, Any], question: Question, decision: Decision) -> dict[str, Any]:
    if fields["type"] == "noul":
        return {"type": "noul", "noul": decision.probabilities[0]}
    if fields["type"] == "choice":
        names = [option.text for option in question.options]
        own: dict[str, Any] = {"choice": names[decision.index]}
    else:
        names = [str(number) for number in range(len(question.options))]
        own = {"score": decision.score, "legend": dict(zip(names, map(_writable, fields["criteria"]), strict=True))}
    probabilities = dict(zip(names, decision.probabilities, strict=True))
    return {"type": fields["type"], **own, "probabilities": probabilities, "confidence": decision.confidence}
