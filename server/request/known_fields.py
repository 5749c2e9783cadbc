"""Fields of other APIs: which of them are translated, ignored or refused.

Parsing looks here only where a body has a field that its schema does not have, or a value that it does not take. The
tables themselves are in ../protocols/fields.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import quote

from embert.server.http.errors import Invalid, describe, describe_name

_MAX_FIELDS = 1000  # of an object: any API has fewer than 50
_MAX_DEPTH = 8  # of lists and objects in a body; the fields that are read have 5 at most
_CONTAINERS = {list, dict}
_NAMES_IN_HEADER = 16
_LETTERS_OF_A_NAME = 40


class Api(Enum):
    """API whose reference has a field."""

    OPENAI = "OpenAI"
    OLLAMA = "Ollama"
    VLLM = "vLLM"
    TEI = "TEI"
    INFINITY = "Infinity"
    JINA = "Jina"
    VOYAGE = "Voyage"
    MISTRAL = "Mistral"
    COHERE = "Cohere"
    NVIDIA = "NVIDIA NIM"
    HUGGING_FACE = "Hugging Face"
    XINFERENCE = "Xinference"
    TYPESAFE = "TypeSafe"
    EMBERT = "embert"


class Verdict(Enum):
    """Treatment of a field."""

    HONORED = "honored"
    HARMLESS = "harmless"  # dropped, of any type: the response is the same without it
    IGNORED = "ignored"  # dropped, of any type, and named in the response's header
    REFUSED = "refused"  # 422, except for null and for values that ask for the default behavior


@dataclass(frozen=True, slots=True, eq=False)
class KnownField:
    """A field of a request."""

    verdict: Verdict
    apis: tuple[Api, ...]
    reason: str = ""  # why it is not honored; for an honored field that the schema does not have, its meaning
    unless: tuple[Any, ...] = ()  # values of a refused field that change nothing
    translation: Callable[[Any], Mapping[str, Any]] | None = None  # the value in the schema's words
    ignored_with: str = ""  # a field with which this one is dropped, of any type
    is_flat: bool = False  # an object whose fields count as the request's own

    def takes(self, value: Any) -> bool:
        if isinstance(value, list) and value and value not in self.unless:  # one value for each text
            return all(not isinstance(item, list) and self.takes(item) for item in value)
        if value in ("true", "false") and any(isinstance(harmless, bool) for harmless in self.unless):
            value = value == "true"
        return any(value == harmless and type(value) is type(harmless) for harmless in (None, *self.unless))


Fields = Mapping[str, KnownField]


@dataclass(frozen=True, slots=True)
class TranslatedFields:
    """The fields of a request in the words of its schema."""

    values: dict[str, Any]
    ignored: list[str]  # names that no API has, and those of ignored fields
    names: dict[str, str]  # of fields of the schema → as the client wrote them


def translate_fields(values: Mapping[str, Any], own: Collection[str], fields: Fields) -> TranslatedFields:
    """`own` are the schema's fields.

    Raises Invalid for a refused field, one that is there under two names, and an unknown one that is nested too deeply:
    the schema bounds the depth of its fields.
    """
    result: dict[str, Any] = {}
    others: dict[str, tuple[str, Any]] = {}
    ignored = []
    for name, value in _flat(values, fields):
        if name not in own and type(value) in _CONTAINERS and (depth := _depth(value)) > _MAX_DEPTH:
            reason = f"the field {describe_name(name)} has lists and objects to a depth of {depth}"
            raise Invalid(reason, limit=_MAX_DEPTH)
        field = fields.get(name)
        if (field is None and name not in own) or (field is not None and field.is_flat and value is not None):
            ignored.append(name)  # an object of fields inside of another one belongs to no API
        elif field is not None and field.is_flat:
            pass
        elif field is not None and field.verdict is Verdict.IGNORED:
            ignored.append(name)
        elif field is not None and field.verdict is Verdict.REFUSED:
            if not field.takes(value):
                raise _refusal(name, field, value)
        elif field is None or field.verdict is Verdict.HONORED:
            if field is not None and field.ignored_with and values.get(field.ignored_with) is not None:
                continue
            if field is None or field.translation is None:
                if result.get(name) not in (None, value):
                    raise Invalid("is in the request twice, with values that differ", name)
                result[name] = value
            elif value is not None:
                for target, translated in field.translation(value).items():
                    other, its_value = others.get(target, (name, translated))
                    if its_value != translated:
                        raise Invalid(f"and `{other}` both mean `{target}`, and they differ", name)
                    others[target] = other, translated
    for target, (name, value) in others.items():
        if target != name and result.get(target) not in (None, value):
            raise Invalid(f"is another name of `{target}`; the request has both, and they differ", name)
        result[target] = value
    return TranslatedFields(result, ignored, {target: name for target, (name, _) in others.items() if target != name})


def _depth(value: Any) -> int:
    """The depth of a field's lists and objects. The body's own object counts as 1."""
    depth, level = 1, [value]
    while level:
        depth += 1
        values = [each.values() if isinstance(each, dict) else each for each in level]
        # The types of many numbers are looked at faster than the numbers.
        containers = (items for items in values if not _CONTAINERS.isdisjoint(map(type, items)))
        level = [item for items in containers for item in items if type(item) in _CONTAINERS]
    return depth


def _flat(values: Mapping[str, Any], fields: Fields) -> list[tuple[str, Any]]:
    result = []
    for name, value in values.items():
        if name not in fields or not fields[name].is_flat or value is None:
            result.append((name, value))
        elif isinstance(value, Mapping):
            result.extend(value.items())
        else:
            raise Invalid("must be an object", name, value=describe(value))
    if len(result) > _MAX_FIELDS:
        raise Invalid(f"the request has {len(result)} fields", limit=_MAX_FIELDS)
    return result


def _refusal(name: str, field: KnownField, value: Any) -> Invalid:
    if not field.unless:
        return Invalid(f"is not supported and must be null or absent: {field.reason}", name)
    wanted = ", ".join(map(json.dumps, field.unless))
    return Invalid(f"must be {wanted} or absent: {field.reason}", name, value=describe(value))


def header_value(names: Collection[str]) -> bytes:
    """Names of fields for a header: at most 16 of them, each of at most 40 letters, and how many more there are."""
    written = [quote(name[:_LETTERS_OF_A_NAME], safe="") or '""' for name in list(names)[:_NAMES_IN_HEADER]]
    more = len(names) - len(written)
    return ",".join([*written, *([f"+{more}"] if more else [])]).encode()
