"""What `config.json` says about the encoder, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.json_files import read_object

__all__ = ["EncoderConfig"]

# HuggingFace's names → the function that is computed. `gelu` is the exact (erf) form; the other two are the tanh form.
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
ARCHITECTURES = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet")
UNTYPED = ("distilbert", "mpnet")  # without token types
ROBERTAS = ("roberta", "xlm-roberta", "camembert")
MPNET_FIRST_POSITION = 2  # whatever its config.json says of padding
MPNET_BUCKETS = 32  # the number that HuggingFace's code computes with, whatever config.json says
# What DistilBERT's config.json calls BERT's fields.
DISTILBERT = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Shapes and constants of one encoder."""

    architecture: str  # one of ARCHITECTURES
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    activation: str  # "gelu" (erf), "gelu_tanh", "relu"
    max_positions: int  # tokens of the longest text
    type_vocab_size: int
    layer_norm_eps: float
    first_position: int = 0  # the row of the stored position table that a text's first token takes
    relative_buckets: int = 0  # of distances between tokens, each with a score of its own; 0: none

    @property
    def padding_id(self) -> int | None:
        """The token that counts for no position and has a row of the position table to itself; None: there is none.

        Where positions count from it, HuggingFace gives every token of that id, also one that a text spells out, the
        row of the same number.
        """
        return self.first_position - 1 if self.first_position else None

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
        if architecture in UNTYPED:
            fields = {**fields, "type_vocab_size": 1}
        if architecture == "distilbert":  # whose config.json does not tell
            fields = {**fields, "layer_norm_eps": 1e-12}
        kind = fields.get("position_embedding_type", "absolute")
        if kind != "absolute":
            raise _unsupported(path, "position_embedding_type", kind, ("absolute",))
        for flag in ("is_decoder", "add_cross_attention"):
            if fields.get(flag, False):
                raise _unsupported(path, flag, fields[flag], (False,))
        names = DISTILBERT if architecture == "distilbert" else {}

        def name(field: str) -> str:
            return names.get(field, field)

        activation = fields.get(name("hidden_act"), "gelu")
        if activation not in ACTIVATIONS:
            raise _unsupported(path, name("hidden_act"), activation, tuple(ACTIVATIONS))
        first_position = _first_position(architecture, fields, path)
        buckets = fields.get("relative_attention_num_buckets", MPNET_BUCKETS)
        if architecture == "mpnet" and buckets != MPNET_BUCKETS:
            raise _unsupported(path, "relative_attention_num_buckets", buckets, (MPNET_BUCKETS,))
        positions = _positive(fields, "max_position_embeddings", int, path)
        if positions <= first_position:
            raise BrokenModel(
                f"{path}: max_position_embeddings must be above {first_position}, which is where texts start; "
                f"found {positions}"
            )
        config = cls(
            architecture=architecture,
            vocab_size=_positive(fields, "vocab_size", int, path),
            hidden_size=_positive(fields, name("hidden_size"), int, path),
            layers=_positive(fields, name("num_hidden_layers"), int, path),
            heads=_positive(fields, name("num_attention_heads"), int, path),
            intermediate_size=_positive(fields, name("intermediate_size"), int, path),
            activation=ACTIVATIONS[activation],
            max_positions=positions - first_position,
            type_vocab_size=_positive(fields, "type_vocab_size", int, path),
            layer_norm_eps=_positive(fields, "layer_norm_eps", float, path),
            first_position=first_position,
            relative_buckets=MPNET_BUCKETS if architecture == "mpnet" else 0,
        )
        if config.hidden_size % config.heads:
            raise UnsupportedModel(
                f"{path}: {name('hidden_size')} {config.hidden_size} is not a multiple of "
                f"{name('num_attention_heads')} {config.heads}"
            )
        return config


def _first_position(architecture: str, fields: dict[str, Any], path: Path) -> int:
    """RoBERTa counts positions from the one after its padding token's id."""
    if architecture == "mpnet":
        return MPNET_FIRST_POSITION
    if architecture not in ROBERTAS:
        return 0
    padding = fields.get("pad_token_id", 1)
    if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
        raise BrokenModel(f"{path}: pad_token_id must be an int of at least 0, found {padding!r}")
    return padding + 1


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
