"""What `config.json` says about the encoder, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import BrokenModel, UnsupportedModel
from engine.json_files import read_object

__all__ = ["EncoderConfig"]

# HuggingFace's names → the function that is computed. `gelu` is the exact (erf) form; the other two are the tanh form.
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
ARCHITECTURES = ("bert",)

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Shapes and constants of one encoder."""

    architecture: str  # "bert"
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    activation: str  # "gelu" (erf), "gelu_tanh", "relu"
    max_positions: int
    type_vocab_size: int
    layer_norm_eps: float

    @property
    def head_size(self) -> int:
        """Columns of one attention head."""
        return self.hidden_size // self.heads

    @classmethod
    def read(cls, path: Path) -> EncoderConfig:
        """Read a `config.json`.

        Raises BrokenModel when it is not readable or lacks a field, UnsupportedModel when it asks for what no encoder
        here computes.
        """
        return cls.from_fields(read_object(path), path)

    @classmethod
    def from_fields(cls, fields: dict[str, Any], path: Path) -> EncoderConfig:
        """As `read`, from the parsed object; `path` is for messages."""
        architecture = fields.get("model_type")
        if architecture is None:
            raise BrokenModel(f"{path} has no model_type")
        if architecture not in ARCHITECTURES:
            raise _unsupported(path, "model_type", architecture, ARCHITECTURES)
        positions = fields.get("position_embedding_type", "absolute")
        if positions != "absolute":
            raise _unsupported(path, "position_embedding_type", positions, ("absolute",))
        for flag in ("is_decoder", "add_cross_attention"):
            if fields.get(flag, False):
                raise _unsupported(path, flag, fields[flag], (False,))
        activation = fields.get("hidden_act", "gelu")
        if activation not in ACTIVATIONS:
            raise _unsupported(path, "hidden_act", activation, tuple(ACTIVATIONS))
        config = cls(
            architecture=architecture,
            vocab_size=_positive(fields, "vocab_size", int, path),
            hidden_size=_positive(fields, "hidden_size", int, path),
            layers=_positive(fields, "num_hidden_layers", int, path),
            heads=_positive(fields, "num_attention_heads", int, path),
            intermediate_size=_positive(fields, "intermediate_size", int, path),
            activation=ACTIVATIONS[activation],
            max_positions=_positive(fields, "max_position_embeddings", int, path),
            type_vocab_size=_positive(fields, "type_vocab_size", int, path),
            layer_norm_eps=_positive(fields, "layer_norm_eps", float, path),
        )
        if config.hidden_size % config.heads:
            raise UnsupportedModel(
                f"{path}: hidden_size {config.hidden_size} is not a multiple of num_attention_heads {config.heads}"
            )
        return config


def _unsupported(path: Path, field: str, value: object, supported: tuple[object, ...]) -> UnsupportedModel:
    listed = ", ".join(map(repr, supported))
    return UnsupportedModel(f"{path}: {field} {value!r} is not supported; supported: {listed}")


def _positive(fields: dict[str, Any], field: str, kind: type[Number], path: Path) -> Number:
    if field not in fields:
        raise BrokenModel(f"{path} has no {field}")
    value = fields[field]
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or value <= 0:
        raise BrokenModel(f"{path}: {field} must be a positive {kind.__name__}, found {value!r}")
    return kind(value)
