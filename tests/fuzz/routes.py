"""A server's routes, and valid requests for them, from its OpenAPI document."""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass
from random import Random
from typing import Any

WORDS = ("a", "the", "hello", "world", "東京", "naïve", "👩‍🚀", "x" * 30, "don't", "42", "\t", "ﬁ", "[SEP]", "<pad>")
MAX_ITEMS = 4


@dataclass(frozen=True, slots=True)
class Ask:
    """One valid request, before it is bytes."""

    method: str
    path: str
    body: Any = None  # of a POST
    example: bool = False  # the document's own example of what the model can do: it must get 200


class Routes:
    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._operations: list[tuple[str, str, dict[str, Any]]] = [
            (method.upper(), path, operation)
            for path, item in document["paths"].items()
            for method, operation in item.items()
            if method in ("get", "post")
        ]
        self._posts = [each for each in self._operations if each[0] == "POST"]

    def __len__(self) -> int:
        return len(self._operations)

    def examples(self) -> list[Ask]:
        """The document's own example of every route, which must get 200 where the model has the task."""
        return [ask for each in self._operations if (ask := self._example(*each)).example]

    def offers(self, path: str) -> bool:
        """True if the model can serve POST of this path."""
        return any(path == each and not operation.get("x-task-missing") for _, each, operation in self._posts)

    def some(self, random: Random) -> Ask:
        """A valid request of any route, most often one with a body."""
        method, path, operation = random.choice(self._posts if random.random() < 0.8 else self._operations)
        if random.random() < 0.4 and "{" not in path:
            return self._example(method, path, operation)
        path = re.sub(r"\{\w+\}", urllib.parse.quote(random.choice(WORDS)), path)
        return Ask(method, path, self._value(_content(operation)["schema"], random) if method == "POST" else None)

    def post(self, random: Random) -> Ask:
        """A valid request with a body."""
        method, path, operation = random.choice(self._posts)
        if random.random() < 0.5:
            return self._example(method, path, operation)
        return Ask(method, path, self._value(_content(operation)["schema"], random))

    def _example(self, method: str, path: str, operation: dict[str, Any]) -> Ask:
        body = _content(operation)["example"] if method == "POST" else None
        works = "{" not in path and not operation.get("x-task-missing")
        return Ask(method, path, body, example=works)

    def _value(self, schema: dict[str, Any], random: Random) -> Any:
        """A value that a JSON schema allows."""
        if "$ref" in schema:
            target: Any = self._document
            for step in schema["$ref"].removeprefix("#/").split("/"):
                target = target[step]
            return self._value(target, random)
        for choices in ("anyOf", "oneOf"):
            if choices in schema:
                return self._value(random.choice(schema[choices]), random)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return random.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                return self._object(schema, random)
            case "array":
                low = schema.get("minItems", 0)
                count = random.randint(low, max(low, min(schema.get("maxItems", MAX_ITEMS), MAX_ITEMS)))
                return [self._value(schema.get("items", {}), random) for _ in range(count)]
            case "string":
                return " ".join(random.choices(WORDS, k=random.randint(max(1, schema.get("minLength", 1)), 12)))
            case "integer":
                return random.randint(schema.get("minimum", 0), min(schema.get("maximum", 1000), 30_000))
            case "number":
                return random.uniform(schema.get("minimum", 0), schema.get("maximum", 1))
            case "boolean":
                return random.random() < 0.5
            case _:
                return None

    def _object(self, schema: dict[str, Any], random: Random) -> dict[str, Any]:
        required = schema.get("required", ())
        return {
            name: self._value(property_, random)
            for name, property_ in schema.get("properties", {}).items()
            if name in required or random.random() < 0.3
        }


def _content(operation: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = operation["requestBody"]["content"]["application/json"]
    return content
