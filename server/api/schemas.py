"""What requests look like, in both dialects, and what is said about those that do not."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError

from embert.server.api.large_bodies import LARGE, SplitIds
from embert.server.http.errors import BadRequest, Invalid

__all__ = [
    "DecodeRequest",
    "EmbedAllRequest",
    "EmbedRequest",
    "EmbeddingsRequest",
    "SimilarityInputs",
    "SimilarityParameters",
    "SimilarityRequest",
    "TextOrIds",
    "TokenizeRequest",
    "describe_name",
    "parse",
]


class _FailFast(FailFast):
    __hash__ = object.__hash__  # Python 3.11 wants it of what stands in a union


# The first wrong item ends the validation of a list: ten megabytes of nulls would be millions of complaints.
_Texts = Annotated[list[str], _FailFast()]
_Ids = Annotated[list[int], _FailFast()]
_IdLists = Annotated[list[_Ids], _FailFast()]
TextOrIds = str | _Texts | _Ids | _IdLists


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


Direction = Annotated[Literal["right", "left"], BeforeValidator(_lower)]


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class EmbeddingsRequest(_Request):
    """`POST /v1/embeddings`: OpenAI's fields, and three extensions."""

    input: TextOrIds = Field(description="A text, texts, token ids of one text, or token ids of several.")
    model: str | None = Field(None, description="The served model's name or id.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64 is little-endian float32. Default: float."
    )
    dimensions: int | None = Field(None, description="Cut the vectors to this many numbers, then normalise again.")
    user: str | None = Field(None, description="Accepted and ignored.")
    truncate: bool | None = Field(
        None, description="Cut texts that are too long. Default: the server's --auto-truncate."
    )
    prompt_name: str | None = Field(None, description="One of the model's prompts, put before each text.")
    normalize: bool = Field(True, description="Scale vectors to length 1.")


class EmbedAllRequest(_Request):
    """`POST /embed_all`: one vector a token."""

    inputs: TextOrIds = Field(description="A text, texts, token ids of one text, or token ids of several.")
    truncate: bool | None = Field(
        None, description="Cut texts that are too long. Default: the server's --auto-truncate."
    )
    truncation_direction: Direction = Field("right", description="The end that is cut off.")
    prompt_name: str | None = Field(None, description="One of the model's prompts, put before each text.")


class EmbedRequest(EmbedAllRequest):
    """`POST /embed`: text-embeddings-inference's fields."""

    normalize: bool = Field(True, description="Scale vectors to length 1.")
    dimensions: int | None = Field(None, description="Cut the vectors to this many numbers, then normalise again.")


class SimilarityInputs(_Request):
    """One text, and the texts it is compared with."""

    source_sentence: str
    sentences: _Texts


class SimilarityParameters(_Request):
    """How texts are read."""

    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None


class SimilarityRequest(_Request):
    """`POST /similarity`: cosine of one text with each of several."""

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


class TokenizeRequest(_Request):
    """`POST /tokenize`."""

    inputs: str | _Texts
    add_special_tokens: bool = True
    prompt_name: str | None = None


class DecodeRequest(_Request):
    """`POST /decode`."""

    ids: _Ids | _IdLists
    skip_special_tokens: bool = True


RequestT = TypeVar("RequestT", bound=BaseModel)


def parse(schema: type[RequestT], body: bytes, split: SplitIds | None = None) -> RequestT:
    """The request in `body`; `split` is what `split_ids` made of it.

    Raises BadRequest when that is not JSON, Invalid when it is not what `schema` says.
    """
    if split is not None:
        rest, stand_in, ids = split
        try:
            request = schema.model_validate_json(rest)
        except ValidationError:
            pass  # what is said about it is said about the whole
        else:
            for field in ("input", "inputs", "ids"):
                if getattr(request, field, None) == [stand_in]:
                    return request.model_copy(update={field: ids})
    if len(body) > LARGE:
        # orjson takes half of pydantic's time. It accepts less, and pydantic then says what is wrong.
        try:
            return schema.model_validate(orjson.loads(body))
        except (orjson.JSONDecodeError, ValidationError):
            pass
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise _explain(schema, error) from None


def _explain(schema: type[BaseModel], error: ValidationError) -> BadRequest | Invalid:
    """One of the complaints, in words.

    A union complains once for each thing that the value could have been; meant was the one that got furthest.
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
    if (schema, field) in _WANTED:
        return Invalid(f"`{field}` must be {_WANTED[schema, field]}; `{name}` is {_describe(value)}", field)
    wanted = worst["msg"].removeprefix("Input should be ")
    if kind == "literal_error" and isinstance(value, str) and value.isidentifier() and len(value) <= 20:
        return Invalid(f"`{name}` must be {wanted}; it is {value!r}", field)
    return Invalid(f"`{name}` must be {wanted}; it is {_describe(value)}", field)


_TEXT_OR_IDS = "a string, a list of strings, a list of token ids, or a list of such lists"
_WANTED: dict[tuple[type[BaseModel], str], str] = {
    (EmbeddingsRequest, "input"): _TEXT_OR_IDS,
    (EmbedRequest, "inputs"): _TEXT_OR_IDS,
    (EmbedAllRequest, "inputs"): _TEXT_OR_IDS,
    (TokenizeRequest, "inputs"): "a string or a list of strings",
    (DecodeRequest, "ids"): "a list of token ids, or a list of such lists",
}


def _path(location: tuple[int | str, ...]) -> list[int | str]:
    """Without the names of union members that pydantic puts between: `list[str]`, `str`, `constrained-int`."""
    first, *rest = location or ("",)
    if not location:
        return []
    members = {"str", "int", "bool", "list[str]", "list[int]", "list[list[int]]", "none"}
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
