"""Request bodies: the types that their fields are made of, parsing, and one sentence about a body that is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError

from embert.server.api.input.large_bodies import LARGE, SplitIds
from embert.server.http.errors import BadRequest, Invalid

__all__ = [
    "FAIL_FAST",
    "IDS",
    "MODELS_DIRECTION",
    "TASK",
    "TEXTS_AND_IDS",
    "TEXT_OR_IDS",
    "Direction",
    "IdList",
    "IdLists",
    "InputForm",
    "InputForms",
    "InputType",
    "RequestBody",
    "TextList",
    "TextLists",
    "TextOrIds",
    "TextsAndIds",
    "describe_name",
    "parse",
    "validate",
]


class _FailFast(FailFast):
    __hash__ = object.__hash__  # Python 3.11 needs it for members of a union


# The first wrong item ends the validation of a list: ten megabytes of nulls would be millions of complaints.
FAIL_FAST = _FailFast()
TextList = Annotated[list[str], FAIL_FAST]
TextLists = Annotated[list[TextList], FAIL_FAST]
IdList = Annotated[list[int], FAIL_FAST]
IdLists = Annotated[list[IdList], FAIL_FAST]
# The first form that fits is taken: pydantic's own way tries the others too, which costs as much again.
_IN_ORDER = Field(union_mode="left_to_right")
TextOrIds = Annotated[str | TextList | IdList | IdLists, _IN_ORDER]
# Both in one list, as TEI takes them.
TextsAndIds = Annotated[str | TextList | IdList | IdLists | Annotated[list[str | IdList], FAIL_FAST], _IN_ORDER]


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


Direction = Annotated[Literal["right", "left"], BeforeValidator(_lower)]
MODELS_DIRECTION: Any = None  # where a request does not say: as the model's tokenizer does, mostly "right"
InputType = Literal["query", "document"]  # what a text is to a model of late interaction, or with adapters
TASK = "One of the model's adapters, which `/info` lists, with its prompt. Default: none."


@dataclass(frozen=True, slots=True)
class InputForm:
    """What a field with texts or ids may hold."""

    words: str = ""  # for the error about another value; without them, pydantic's own
    # As the OpenAPI document states it:
    shortest: int = 1  # characters of a text
    together: int = 0  # a list of texts is one item of at most so many texts; 0: each text is an item


InputForms = dict[str, InputForm]  # of the fields with texts or ids
TEXT_OR_IDS = InputForm("a string, a list of strings, a list of token ids, or a list of such lists")
TEXTS_AND_IDS = InputForm("a string, a list of token ids, or a list of strings and of such lists")
IDS = InputForm("a list of token ids, or a list of such lists")


class RequestBody(BaseModel):
    """Base of all request bodies and of the objects in them."""

    model_config = ConfigDict(strict=True, frozen=True)
    input_forms: ClassVar[InputForms] = {}
    text_limit: ClassVar[str] = "max_client_batch_size"  # the option that limits its texts
    strings_per_text: ClassVar[int] = 1  # at the most


RequestT = TypeVar("RequestT", bound=RequestBody)


def parse(schema: type[RequestT], body: bytes, split: SplitIds | None = None) -> RequestT:
    """The request in `body`; `split` is what `split_ids` made of it.

    Raises BadRequest when the body is not JSON, Invalid when it does not match `schema`.
    """
    if split is not None:
        rest, stand_in, ids = split
        try:
            request = schema.model_validate_json(rest)
        except ValidationError:
            pass  # the error is about the whole body
        else:
            for field in ("input", "inputs", "ids"):
                if getattr(request, field, None) == [stand_in]:
                    return request.model_copy(update={field: ids})
    if len(body) > LARGE:
        # orjson takes half of pydantic's time. It accepts less; what it refuses is explained by pydantic.
        try:
            return schema.model_validate(orjson.loads(body))
        except (orjson.JSONDecodeError, ValidationError):
            pass
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise _explain(schema, error) from None


def validate(schema: type[RequestT], value: dict[str, Any]) -> RequestT:
    """The request in an object that was part of a body. Raises Invalid when it does not match `schema`."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise _explain(schema, error) from None


def _explain(schema: type[RequestBody], error: ValidationError) -> BadRequest | Invalid:
    """The most telling of the complaints, in words.

    A union complains once for each of its members; the client meant the one whose validation got furthest.
    """
    complaints = error.errors(include_url=False, include_context=True)
    if complaints[0]["type"] == "json_invalid":
        reason = complaints[0]["ctx"]["error"]
        if "hex escape" in reason or "surrogate" in reason:
            reason += "; a lone surrogate such as \\ud800 is not text"
        return BadRequest(f"the request body is not valid JSON: {reason}")
    worst = max(complaints, key=lambda complaint: [step for step in complaint["loc"] if isinstance(step, int)])
    path, kind, value = _path(worst["loc"]), worst["type"], worst["input"]
    if not path:
        return Invalid(f"the request body must be a JSON object; it is {_describe(value)}")
    field, name = str(path[0]), _spell(path)
    if kind == "missing":
        return Invalid(f"`{name}` is required", field)
    form = schema.input_forms.get(field)
    if form is not None and form.words:
        return Invalid(f"`{field}` must be {form.words}; `{name}` is {_describe(value)}", field)
    wanted = "null" if kind == "none_required" else worst["msg"].removeprefix("Input should be ")
    if kind == "literal_error" and isinstance(value, str) and value.isidentifier() and len(value) <= 20:
        return Invalid(f"`{name}` must be {wanted}; it is {value!r}", field)
    return Invalid(f"`{name}` must be {wanted}; it is {_describe(value)}", field)


def _path(location: tuple[int | str, ...]) -> list[int | str]:
    """Without the names of union members that pydantic puts in between: `list[str]`, `str`, `int`."""
    first, *rest = location or ("",)
    if not location:
        return []
    kinds = ("str", "int", "bool", "none", "Document", "union[str,list[int]]", "list[str]", "list[int]")
    members = {*kinds, *(f"list[{kind}]" for kind in kinds)}
    return [first, *(step for step in rest if step not in members)]


def _spell(path: list[int | str]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


def describe_name(name: str) -> str:
    """A name that a client gave, for an error: as it is, unless it looks more like a text."""
    return repr(name) if len(name) <= 100 and name.isprintable() else _describe(name)


def _describe(value: Any) -> str:
    """What a value is, without giving away a text."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(value) if abs(value) < 1e18 else "not a number of any use"
        case str():
            return f"a string of {len(value)} characters"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case _:
            return "an object"
