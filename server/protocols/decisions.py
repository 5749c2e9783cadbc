"""Decisions: questions about a text, and a probability for each of their options, as OpenAI and TypeSafe have them.

`/v1/decisions` has OpenAI's form, which vLLM has too; `/v1/systemone` TypeSafe's, in which servers of open models are
asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from embert.engine import Decision, Option, Question
from embert.engine.decisions import check_questions, decision_tasks, pair_count, read_decisions, second_texts
from embert.engine.tasks import NO_TASK
from embert.engine.tokenization.encoded import TokenizeOptions
from embert.server.http.errors import Invalid, describe, describe_name
from embert.server.protocols.fields import FIELDS
from embert.server.protocols.ranking import join_rows
from embert.server.protocols.request_context import JSON, RequestContext
from embert.server.registry.inputs import TextPairs, check_texts
from embert.server.request.request_body import FAIL_FAST, InputForm, InputForms, RequestBody, RequestObject

Json = str | dict[str, Any] | list[Any]
_BYTES_AN_OPTION = 64  # of a response, in addition to the option's text
_LABEL_MASS = (
    "An extension: return each question's `label_mass` too, the share of its options in the probability of all tokens. "
    "Of language models on CPUs."
)
_STRINGS = 256  # of a body with many questions, for each of --max-client-documents


async def _decide(
    context: RequestContext, state: str, questions: Sequence[Question], param: str, *, label_mass: bool
) -> tuple[list[Decision], int]:
    """The decisions, and the number of tokens that were read. `param` is the field of the state."""
    handle = context.handle
    handle.served.check_tasks(NO_TASK, decides=True)
    tasks, engine = decision_tasks(handle.model, label_mass=label_mass), handle.engine
    if label_mass and engine is not None and engine.device != "cpu":
        raise Invalid("is read on CPUs only, and this model runs on a GPU", "label_mass")
    check_texts([state], param)
    check_questions(handle.model, questions)
    handle.limits.check_documents(pair_count(handle.model, questions), "questions")
    texts = second_texts(handle.model, questions)
    encoded = await context.tokenize_pairs(
        TextPairs([state], texts), TokenizeOptions(param=param, second_param="questions", only_first=True)
    )
    context.hold(
        sum(_BYTES_AN_OPTION + len(each.text) for asked in questions for each in asked.options), "the response"
    )
    rows = (await context.run(encoded, tasks)).rows
    main, *masses = (rows[task].values for task in tasks)
    return read_decisions(handle.model, questions, main, *masses), encoded.tokens


def _writable(value: Json) -> Json:
    """The value, or its text where it has an integer of more than 64 bits."""
    try:
        orjson.dumps(value)
    except TypeError:
        return _text_of(value)
    return value


def _text_of(value: Json) -> str:
    """A text, or the text of other JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- OpenAI ---


class DecisionPart(RequestBody):
    """A part of a message: text, or JSON that is read as its text. Parts of other types are refused."""

    model_config = ConfigDict(extra="ignore")
    type: str = Field(description="input_text or input_json.")
    text: str | None = None
    data: dict[str, Any] | list[Any] | None = None


Parts = Annotated[list[DecisionPart], FAIL_FAST]


class DecisionMessage(RequestBody):
    """A message of a user. Other items, such as calls of tools, are refused."""

    model_config = ConfigDict(extra="ignore")
    type: str = Field("message", description="message.")
    role: str | None = Field(None, description="user.")
    content: str | Parts | None = None


class DecisionChoice(RequestObject):
    """A choice."""

    value: StrictStr | StrictBool
    description: str | None = None


class DecisionLevel(RequestObject):
    """A level of a score."""

    label: str
    description: str | None = None


class DecisionQuestion(RequestObject):
    """A question. `choices` are for the type choice, `levels` for score."""

    type: Literal["predicate", "choice", "score"]
    name: str | None = Field(None, description="Name of the answer.")
    instructions: str | Parts = Field(description="A statement, or a question, about the input.")
    choices: Annotated[list[DecisionChoice], FAIL_FAST] | None = Field(None, description="2 to 255, each with a value.")
    levels: Annotated[list[DecisionLevel], FAIL_FAST] | None = Field(None, description="2 to 10, the lowest one first.")


class DecisionsRequest(RequestBody):
    """`POST /v1/decisions`."""

    known = FIELDS["decisions"]
    text_limit: ClassVar[str] = "max_client_documents"
    strings_per_text: ClassVar[int] = _STRINGS
    input_forms: ClassVar[InputForms] = {"questions": InputForm(shortest=0, most=200)}

    input: str | Annotated[list[DecisionMessage], FAIL_FAST] = Field(
        description="The text that the questions are about, or messages of a user with it."
    )
    questions: Annotated[list[DecisionQuestion], FAIL_FAST] = Field(description="1 to 200 questions.")
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
    state, questions = read_decisions_request(request)
    decided, tokens = await _decide(context, state, questions, "input", label_mass=request.label_mass)
    rows = await join_rows(orjson.dumps(each) for each in answers(request, decided))
    usage = {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens,
    }
    return JSON, b'{"model":%b,"answers":[%b],"usage":%b}' % (
        orjson.dumps(handle.served.name),
        rows,
        orjson.dumps(usage),
    )


def read_decisions_request(request: DecisionsRequest) -> tuple[str, list[Question]]:
    """The text of a request and its questions. Raises Invalid."""
    questions = [_question(asked, f"questions[{index}]") for index, asked in enumerate(request.questions)]
    return _read_input(request.input), questions


def _read_input(messages: str | Sequence[DecisionMessage]) -> str:
    """The text of all messages. Raises Invalid for other items than messages of a user."""
    if isinstance(messages, str):
        return messages
    texts = []
    for index, message in enumerate(messages):
        path = f"input[{index}]"
        for name, wanted, value in (("type", "message", message.type), ("role", "user", message.role)):
            if value != wanted:
                shown = describe(value) if value is None else describe_name(value)
                raise Invalid(f"must be {wanted}: models read texts only, and no tools", f"{path}.{name}", value=shown)
        if message.content is None:
            raise Invalid("is required", f"{path}.content")
        texts.append(_read_parts(message.content, f"{path}.content"))
    return "\n\n".join(texts)


def _read_parts(parts: str | Sequence[DecisionPart], path: str) -> str:
    """The text of the parts of the field at `path`. Raises Invalid for images and other types."""
    if isinstance(parts, str):
        return parts
    texts = []
    for index, part in enumerate(parts):
        read = {"input_text": ("text", part.text), "input_json": ("data", part.data)}.get(part.type)
        if read is None:
            reason = "must be input_text or input_json: models read texts only, and no images"
            raise Invalid(reason, f"{path}[{index}].type", value=describe_name(part.type))
        name, value = read
        if value is None:
            raise Invalid("is required", f"{path}[{index}].{name}")
        texts.append(_text_of(value))
    return "\n\n".join(texts)


def _question(asked: DecisionQuestion, path: str) -> Question:
    """The question at `path`. Raises Invalid for the options of another type."""
    instructions = _read_parts(asked.instructions, f"{path}.instructions")
    given = {"choices": asked.choices, "levels": asked.levels}
    wanted = {"choice": "choices", "score": "levels"}.get(asked.type)
    for name, value in given.items():
        if (value is None) == (name == wanted):
            raise Invalid(
                f"{'is required' if name == wanted else 'must be absent'} in a question of type {asked.type}",
                f"{path}.{name}",
            )
    if asked.type == "predicate":
        return Question.predicate(instructions)
    choices, levels = asked.choices or (), asked.levels or ()
    if len({(type(each.value), each.value) for each in choices}) < len(choices):
        raise Invalid("has two equal choices", f"{path}.choices")
    options = [Option(_choice_text(each.value), each.description or "") for each in choices]
    options += [Option(each.label, each.description or "") for each in levels]
    return Question(asked.type, instructions, tuple(options), f"{path}.{wanted}")


def _choice_text(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def answers(request: DecisionsRequest, decided: Sequence[Decision]) -> Iterator[dict[str, Any]]:
    """The fields of each answer."""
    for question, decision in zip(request.questions, decided, strict=True):
        fields: dict[str, Any] = {"type": question.type, "name": question.name}
        if decision.label_mass is not None:
            fields["label_mass"] = decision.label_mass
        if question.type == "predicate":
            yield {**fields, "probability": decision.probabilities[0]}
            continue
        if question.choices is not None:
            values: list[dict[str, Any]] = [{"value": each.value} for each in question.choices]
            fields["choice"] = question.choices[decision.index].value
        else:
            values = [{"value": number, "label": each.label} for number, each in enumerate(question.levels or ())]
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
    instructions: Json | None = Field(None, description="A statement, or a question, about the state.")
    criteria: dict[str, Json | None] | Annotated[list[Json], FAIL_FAST] | None = None


class SystemOneRequest(RequestBody):
    """`POST /v1/systemone`."""

    known = FIELDS["systemone"]
    text_limit: ClassVar[str] = "max_client_documents"
    strings_per_text: ClassVar[int] = _STRINGS

    state: Json = Field(description="What the questions are about: a text, or JSON that is read as its text.")
    questions: dict[str, SystemOneQuestion] = Field(description="1 to 200 questions by name.")
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
    state, questions = read_system_one_request(request)
    decided, tokens = await _decide(context, state, questions, "state", label_mass=request.label_mass)
    rows = await join_rows(
        b"%b:%b" % (orjson.dumps(name), orjson.dumps(answer))
        for name, answer in system_one_answers(request, questions, decided)
    )
    masses = diagnostics_of(request, decided)
    diagnostics = b',"diagnostics":%b' % orjson.dumps(masses) if masses else b""
    return JSON, b'{"model":%b,"answers":{%b},"usage":{"input_tokens":%d,"output_tokens":0}%b}' % (
        orjson.dumps(handle.served.name),
        rows,
        tokens,
        diagnostics,
    )


def read_system_one_request(request: SystemOneRequest) -> tuple[str, list[Question]]:
    """The text of a request and its questions. Raises Invalid."""
    questions = [_system_one_question(asked, f"questions.{name}") for name, asked in request.questions.items()]
    return _text_of(request.state), questions


def system_one_answers(
    request: SystemOneRequest, questions: Sequence[Question], decided: Sequence[Decision]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each question and the fields of its answer."""
    for (name, asked), question, decision in zip(request.questions.items(), questions, decided, strict=True):
        yield name, _system_one_answer(asked, question, decision)


def diagnostics_of(request: SystemOneRequest, decided: Sequence[Decision]) -> dict[str, dict[str, float | None]]:
    """`label_mass` of each question, where it was read."""
    if not request.label_mass:
        return {}
    return {name: {"label_mass": each.label_mass} for name, each in zip(request.questions, decided, strict=True)}


def _system_one_question(asked: SystemOneQuestion, path: str) -> Question:
    """The question at `path`. Raises Invalid for criteria of another type."""
    instructions, criteria, param = _text_of(asked.instructions or ""), asked.criteria, f"{path}.criteria"
    if asked.type == "score":
        if not isinstance(criteria, list):
            raise Invalid("must be a list in a question of type score", param, value=describe(criteria))
        return Question.score(instructions, [_text_of(each) for each in criteria], param=param)
    described = {} if criteria is None and asked.type == "noul" else criteria
    if not isinstance(described, Mapping):
        raise Invalid(f"must be an object in a question of type {asked.type}", param, value=describe(criteria))
    texts = {name: _text_of(each or "") for name, each in described.items()}
    if asked.type == "choice":
        return Question.choice(instructions, texts, param=param)
    if other := texts.keys() - {"true", "false"}:
        raise Invalid("may have true and false only", param, value=describe_name(min(other)))
    if not instructions and not any(texts.values()):
        raise Invalid("is required in a noul without criteria", f"{path}.instructions")
    return Question.predicate(instructions, yes=texts.get("true", ""), no=texts.get("false", ""), param=param)


def _system_one_answer(asked: SystemOneQuestion, question: Question, decision: Decision) -> dict[str, Any]:
    if asked.type == "noul":
        return {"type": "noul", "noul": decision.probabilities[0]}
    if asked.type == "choice":
        names = [option.text for option in question.options]
        own: dict[str, Any] = {"choice": names[decision.index]}
    else:
        names = [str(number) for number in range(len(question.options))]
        legend = map(_writable, asked.criteria or ())
        own = {"score": decision.score, "legend": dict(zip(names, legend, strict=True))}
    probabilities = dict(zip(names, decision.probabilities, strict=True))
    return {"type": asked.type, **own, "probabilities": probabilities, "confidence": decision.confidence}
