"""The fields of one `config.json`, each checked as it is read, with errors that name the file and the field."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.files.json_files import read_object

MOST = 2**31 - 1  # ids, positions and lengths are int32
MOST_LAYERS = 1000

ValueT = TypeVar("ValueT")
NumberT = TypeVar("NumberT", int, float)


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A parsed `config.json`. Fields are asked for by BERT's names; messages use the file's own."""

    path: Path  # for messages
    fields: Mapping[str, Any]
    names: Mapping[str, str] = field(
        default_factory=dict
    )  # BERT's name of a field → this model type's, where it differs

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Parse a file. Raises BrokenModel if it is not a JSON object."""
        return cls(path, read_object(path))

    def rename(self, names: Mapping[str, str]) -> ConfigFile:
        """Returns the file for a model type whose names for BERT's fields are these."""
        return dataclasses.replace(self, names=names)

    def with_fields(self, **fields: Any) -> ConfigFile:
        """Adds fields that the model type's code fixes, regardless of the file."""
        return dataclasses.replace(self, fields={**self.fields, **fields})

    def with_missing(self, **fields: Any) -> ConfigFile:
        """Adds fields that the file lacks; null is not a value, and stays."""
        return self.with_fields(**{**fields, **self.fields})

    def with_defaults(self, **fields: Any) -> ConfigFile:
        """Adds fields that the file lacks, or that are null in it."""
        return self.with_fields(**{name: value for name, value in fields.items() if self.fields.get(name) is None})

    def flatten(self, field: str, supported: tuple[str, ...]) -> ConfigFile:
        """Adds the fields of the object `field`, called "field.inner".

        There are none without the object. Raises BrokenModel for what is not an object, UnsupportedModel for fields
        in it that are not `supported`.
        """
        inner = self.fields.get(field)
        if inner is None:
            return self
        if not isinstance(inner, dict):
            raise BrokenModel(f"{self.path}: {field} must be an object, found {inner!r}")
        for name in inner:
            if name not in supported:
                raise UnsupportedModel(
                    f"{self.path}: {field}.{name} is not supported; supported: {', '.join(supported)}"
                )
        return self.with_fields(**{f"{field}.{name}": value for name, value in inner.items()})

    def name(self, field: str) -> str:
        """Name in this file of a field of BERT's."""
        return self.names.get(field, field)

    def one_of(self, field: str, supported: tuple[ValueT, ...], default: ValueT | None = None) -> ValueT:
        """A field, or its default where the file lacks it. Raises UnsupportedModel for any other value."""
        value = self.fields.get(self.name(field), default)
        for candidate in supported:
            if value == candidate:
                return candidate
        raise self.unsupported(field, value, supported)

    def integer(self, field: str, most: int = MOST) -> int:
        """A positive integer of at most `most`. Raises BrokenModel."""
        value = self._positive(field, int)
        if value > most:
            raise BrokenModel(f"{self.path}: {self.name(field)} must be at most {most}, found {value}")
        return value

    def layers(self) -> int:
        """The number of layers, which is bounded: much is made for each of them. Raises BrokenModel."""
        return self.integer("num_hidden_layers", MOST_LAYERS)

    def number(self, field: str) -> float:
        """A positive number. Raises BrokenModel."""
        return self._positive(field, float)

    def _positive(self, field: str, kind: type[NumberT]) -> NumberT:
        name = self.name(field)
        if name not in self.fields:
            raise BrokenModel(f"{self.path} has no {name}")
        value = self.fields[name]
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not 0 < value < math.inf:
            raise BrokenModel(f"{self.path}: {name} must be a positive {kind.__name__}, found {value!r}")
        return kind(value)

    def list_of(self, field: str, length: int, supported: tuple[str, ...]) -> list[str]:
        """A list of strings, one for each layer. Raises BrokenModel, and UnsupportedModel for another string."""
        values = self.fields[field]
        if not isinstance(values, list) or len(values) != length:
            description = f"{len(values)} of them" if isinstance(values, list) else repr(values)
            raise BrokenModel(f"{self.path}: {field} must be a list of {length} types, found {description}")
        for value in values:
            if value not in supported:
                raise self.unsupported(field, value, supported)
        return values

    def unsupported(self, field: str, value: object, supported: tuple[object, ...]) -> UnsupportedModel:
        """The error for a value that no encoder here computes."""
        names = ", ".join(map(repr, supported))
        return UnsupportedModel(f"{self.path}: {self.name(field)} {value!r} is not supported; supported: {names}")
