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
from embert.engine.models.encoder_config import Attention, DynamicNtk, EncoderConfig, Rotary

__all__ = [
    "DEFAULT",
    "DYNAMIC",
    "MOST_LAYERS",
    "MOST_OF_ONE_PAIR",
    "ROPE",
    "ROPE_FIELDS",
    "ConfigFile",
    "check_pairs",
    "rope_factor",
    "stretched",
    "with_rope_parameters",
    "with_rotary",
]

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

    def renamed(self, names: Mapping[str, str]) -> ConfigFile:
        """The same file, read by a model type whose names for BERT's fields are these."""
        return dataclasses.replace(self, names=names)

    def with_fields(self, **fields: Any) -> ConfigFile:
        """The same file with fields that the model type's code fixes, regardless of the file."""
        return dataclasses.replace(self, fields={**self.fields, **fields})

    def with_missing(self, **fields: Any) -> ConfigFile:
        """The same file with fields that it lacks; null is no value, and stays one."""
        return self.with_fields(**{**fields, **self.fields})

    def with_defaults(self, **fields: Any) -> ConfigFile:
        """The same file with fields that it lacks, or that are null in it."""
        return self.with_fields(**{name: value for name, value in fields.items() if self.fields.get(name) is None})

    def flattened(self, field: str, supported: tuple[str, ...]) -> ConfigFile:
        """The same file with the fields of the object `field` beside its own, called "field.inner".

        There are none where it lacks the object. Raises BrokenModel for what is no object, UnsupportedModel for fields
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
        """What this file calls a field of BERT's."""
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
        stated = self.fields[field]
        if not isinstance(stated, list) or len(stated) != length:
            description = f"{len(stated)} of them" if isinstance(stated, list) else repr(stated)
            raise BrokenModel(f"{self.path}: {field} must be a list of {length} types, found {description}")
        for value in stated:
            if value not in supported:
                raise self.unsupported(field, value, supported)
        return stated

    def unsupported(self, field: str, value: object, supported: tuple[object, ...]) -> UnsupportedModel:
        """The error for a value that no encoder here computes."""
        listed = ", ".join(map(repr, supported))
        return UnsupportedModel(f"{self.path}: {self.name(field)} {value!r} is not supported; supported: {listed}")


ROPE = "rope_parameters"
ROPE_FIELDS = ("rope_theta", "rope_type", "type", "factor", "partial_rotary_factor")
DEFAULT, DYNAMIC = "default", "dynamic"
LARGEST_FACTOR = 1000  # of longer texts: a bound for what a file can ask for
MOST_OF_ONE_PAIR = 2  # columns


def with_rope_parameters(config: ConfigFile, encoder_config: EncoderConfig, theta: float) -> EncoderConfig:
    """The config with the rotary positions that the file states. `theta` is the default of the model type.

    The kind "dynamic" stretches texts of more than `max_position_embeddings` tokens. transformers gives such models no
    longest text; here it is `factor` times as long. Raises BrokenModel or UnsupportedModel.
    """
    check_pairs(config, encoder_config)
    config.one_of("rope_scaling", (None,))  # transformers 4's name for the same object
    stated = config.with_defaults(rope_theta=theta).flattened(ROPE, ROPE_FIELDS)
    kind = stated.one_of(f"{ROPE}.type", (DEFAULT, DYNAMIC), DEFAULT)
    kind = stated.one_of(f"{ROPE}.rope_type", (DEFAULT, DYNAMIC), kind)
    stated.one_of(f"{ROPE}.partial_rotary_factor", (1.0, None))
    inner = f"{ROPE}.rope_theta"
    rotary = Rotary(stated.number(inner if inner in stated.fields else "rope_theta"), encoder_config.head_size)
    if kind == DEFAULT:
        return with_rotary(encoder_config, rotary)
    factor = rope_factor(stated, ROPE)
    trained = encoder_config.max_positions
    rotary = stretched(config, rotary, DynamicNtk(factor, trained))
    return dataclasses.replace(with_rotary(encoder_config, rotary), max_positions=int(factor * trained))


def rope_factor(stated: ConfigFile, field: str) -> float:
    """The `factor` of the object `field`, which is flattened. Raises BrokenModel."""
    factor = stated.number(f"{field}.factor")
    if not 1 <= factor <= LARGEST_FACTOR:
        raise BrokenModel(f"{stated.path}: {field}.factor must be 1 to {LARGEST_FACTOR}, found {factor:g}")
    return factor


def stretched(config: ConfigFile, rotary: Rotary, scaling: DynamicNtk) -> Rotary:
    """The same positions, by the length of each text. Raises UnsupportedModel for one pair, which has no such rule."""
    if rotary.columns <= MOST_OF_ONE_PAIR:
        raise UnsupportedModel(
            f"{config.path}: positions stretched by a text's length need heads of which more than {MOST_OF_ONE_PAIR} "
            f"columns rotate, found {rotary.columns}"
        )
    return dataclasses.replace(rotary, scaling=scaling)


def with_rotary(encoder_config: EncoderConfig, rotary: Rotary) -> EncoderConfig:
    """The architecture with the same rotary positions in every layer, and no table of positions."""
    attention = (Attention(rotary),) * encoder_config.layers
    return dataclasses.replace(encoder_config, position_table=False, attention=attention)


def check_pairs(config: ConfigFile, encoder_config: EncoderConfig) -> None:
    """Raise UnsupportedModel where a head has an odd number of columns."""
    if encoder_config.head_size % 2:
        raise UnsupportedModel(
            f"{config.path}: rotary positions rotate pairs of a head's columns, and {config.name('hidden_size')} / "
            f"{config.name('num_attention_heads')} is {encoder_config.head_size}"
        )
