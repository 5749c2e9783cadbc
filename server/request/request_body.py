"""Request bodies: the types that their fields are made of, parsing, and one sentence about a body that is wrong."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import from_json

from embert.server.http.errors import BadRequest, Invalid, describe
from embert.server.request.known_fields import Fields, TranslatedFields, translate_fields
from embert.server.request.large_bodies import SplitIds

# Values that the fields take, by pydantic's types of errors; the fields in braces are those of its contexts.
_WANTED = {
    "bool_type": "a boolean",
    "dict_type": "an object",
    "greater_than_equal": "at least {ge}",
    "int_type": "an integer",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "an object",
    "none_required": "null",
    "string_type": "a string",
}


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


LOWER_CASE = BeforeValidator(_lower)
Direction = Annotated[Literal["right", "left"], LOWER_CASE]
MODELS_DIRECTION: Any = None  # default: as the model's tokenizer does, mostly "right"
InputType = Literal["query", "document"]  # role of a text for a model of late interaction, or with adapters
TASK = "One of the model's adapters, which `/info` lists, with its prompt. Default: none."


@dataclass(frozen=True, slots=True)
class InputForm:
    """Form of a field with texts or ids."""

    words: str = ""  # for the error about another value; without them, pydantic's own
    # As the OpenAPI document states it:
    shortest: int = 1  # characters of a text
    fewest: int = 1  # items
    together: int = 0  # most texts that are one item, in a list; 0: each text is an item
    most: int = 0  # items; 0: as many as the option of the body's texts allows


InputForms = dict[str, InputForm]  # of the fields with texts or ids
TEXT_OR_IDS = InputForm("a string, a list of strings, a list of token ids, or a list of such lists")
TEXTS_AND_IDS = InputForm("a string, a list of token ids, or a list of strings and of such lists")
IDS = InputForm("a list of token ids, or a list of such lists")


class RequestBody(BaseModel):
    """Base of all request bodies and of the objects in them.

    Fields that a schema does not have are kept until `parse` has looked for them in `known`.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")
    known: ClassVar[Fields] = {}  # a table of ../protocols/fields.py
    input_forms: ClassVar[InputForms] = {}
    text_limit: ClassVar[str] = "max_client_batch_size"  # option that limits its texts
    strings_per_text: ClassVar[int] = 1  # at the most


class RequestObject(RequestBody):
    """Base of the objects in a body. `parse` looks for unknown fields of one where this refuses them."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"additionalProperties": True})


RequestT = TypeVar("RequestT", bound=RequestBody)
Note = Callable[[TranslatedFields], object]


def parse(schema: type[RequestT], body: bytes, split: SplitIds | None = None, note: Note = id) -> RequestT:
    """The request in `body`; `split` is what `split_ids` made of it.

    `note` is called where the body has other fields than the schema. Raises BadRequest when the body is not JSON,
    Invalid when it does not match `schema`, or has a field that `schema.known` refuses.
    """
    if split is not None:
        value = _read_json(split.rest)
        if isinstance(value, dict) and value.get(split.field) == split.stand_in:
            ids = split.ids
            # One id in place of all is enough for validation. `split_ids` has validated the others.
            value[split.field] = few = [ids[0]] if isinstance(ids[0], int) else [ids[0][:1]]
            request = validate(schema, value, note)
            has_ids = getattr(request, split.field, None) == few
            return request.model_copy(update={split.field: ids}) if has_ids else request
    return validate(schema, _read_json(body), note)


def _read_json(body: bytes) -> Any:
    """The value in a body. Raises BadRequest where it is not JSON."""
    try:
        return from_json(body, cache_strings="keys")
    except ValueError as error:
        reason = str(error)
    if body.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        reason = "it begins with a byte order mark; it must be UTF-8 without one"
    if "hex escape" in reason or "surrogate" in reason:
        reason += "; a lone surrogate such as \\ud800 is not text"
    raise BadRequest(f"the request body is not valid JSON: {reason}")


def validate(schema: type[RequestT], value: Any, note: Note = id) -> RequestT:
    """The request in a value that was a body or part of one. `note` and errors are those of `parse`."""
    try:
        request = schema.model_validate(value)
    except ValidationError as error:
        return _validate_other_words(schema, error, value, note)
    return _without_others(request, note) if request.__pydantic_extra__ else request


def validate_part(schema: type[RequestT], value: Any, path: str) -> RequestT:
    """The object at `path` of a body. Raises Invalid; unknown fields are those that the schema refuses."""
    if not isinstance(value, dict):
        raise Invalid("must be an object", path, value=describe(value))
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        explanation = _explain(schema, error)
    explanation.nest(path)
    raise explanation


# --- other fields and other words, which most requests do not have ---


def _without_others(request: RequestT, note: Note) -> RequestT:
    """The request after a look at the fields that its schema does not have."""
    schema, others = type(request), request.__pydantic_extra__ or {}
    values = {name: value for name, value in request.__dict__.items() if name in request.model_fields_set}
    fields = translate_fields({**values, **others}, schema.model_fields, schema.known)
    note(fields)
    if fields.values.keys() == values.keys() and not fields.names:
        return request
    return _validate_fields(schema, fields)


def _validate_other_words(schema: type[RequestT], error: ValidationError, values: Any, note: Note) -> RequestT:
    """The request in a value that the schema does not take, if other words are all that is wrong."""
    if not isinstance(values, dict):
        raise Invalid("the request body must be a JSON object", value=describe(values))
    fields = _translate(schema, values)
    note(fields)
    return _validate_fields(schema, fields, error if fields.values == values else None)


def _translate(schema: type[RequestBody], values: Mapping[str, Any]) -> TranslatedFields:
    """The body and the objects in it in the words of their schemas. Of null where there is a default, nothing stays."""
    fields = translate_fields(values, schema.model_fields, schema.known)
    for name, value in [*fields.values.items()]:
        field = schema.model_fields.get(name)
        if field is None:
            continue
        if value is None and not field.is_required():
            del fields.values[name]
        kinds = (field.annotation, *get_args(field.annotation))
        kind = next((type_ for type_ in kinds if isinstance(type_, type) and issubclass(type_, RequestBody)), None)
        if kind is not None and isinstance(value, dict):
            try:
                inner = _translate(kind, value)
            except Invalid as error:
                error.nest(name)
                raise
            fields.values[name] = inner.values
            fields.ignored.extend(f"{name}.{ignored}" for ignored in inner.ignored)
    return fields


def _validate_fields(
    schema: type[RequestT], fields: TranslatedFields, error: ValidationError | None = None
) -> RequestT:
    """`error` is that of these values, where it is known."""
    values = fields.values
    if error is None:
        try:
            return schema.model_validate(values)
        except ValidationError as first:
            error = first
    if _read_booleans(values, error):
        try:
            return schema.model_validate(values)
        except ValidationError as second:
            error = second
    explanation = _explain(schema, error)
    explanation.rename(fields.names)
    raise explanation from None


def _read_booleans(values: dict[str, Any], error: ValidationError) -> bool:
    """Replace the strings "true" and "false" where booleans are wanted. Returns True if there were any."""
    has_changed = False
    for complaint in error.errors(include_url=False):
        value = complaint["input"]
        word = value.lower() if isinstance(value, str) and len(value) <= 5 else ""
        if complaint["type"] == "bool_type" and word in ("true", "false"):
            holder: Any = values
            *path, last = (step for step in complaint["loc"] if step != "bool")
            for step in path:
                holder = holder[step]
            holder[last] = word == "true"
            has_changed = True
    return has_changed


def _explain(schema: type[RequestBody], error: ValidationError) -> Invalid:
    """The most telling of the complaints, in words.

    A union complains once for each of its members; the client meant the one whose validation got furthest.
    """
    complaints = error.errors(include_url=False, include_context=True)
    worst = max(complaints, key=lambda complaint: [step for step in complaint["loc"] if isinstance(step, int)])
    kind, value = worst["type"], worst["input"]
    field, path = _field_and_path(worst["loc"])
    if kind == "missing":
        return Invalid("is required", field, path=path)
    shown = describe(value)
    form = schema.input_forms.get(field)
    if form is not None and form.words:
        return Invalid(f"must be {form.words}", field, value=shown, value_path=path)
    if kind == "literal_error" and isinstance(value, str) and value.isidentifier() and len(value) <= 20:
        shown = repr(value)
    if kind not in _WANTED:
        return Invalid(f"is not valid: {worst['msg']}", field, path=path, value=shown)
    return Invalid(f"must be {_WANTED[kind].format(**worst.get('ctx', {}))}", field, path=path, value=shown)


def _field_and_path(location: tuple[int | str, ...]) -> tuple[str, str]:
    """A field and the rest of the path, without the union members that pydantic puts in between: `list[str]`, `int`."""
    field, *rest = location
    kinds = ("str", "int", "bool", "none", "Document", "union[str,list[int]]", "list[str]", "list[int]")
    members = {*kinds, *(f"list[{kind}]" for kind in kinds)}
    steps = (step for step in rest if step not in members)
    return str(field), "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
