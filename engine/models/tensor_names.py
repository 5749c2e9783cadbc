"""Names of the encoder's tensors in checkpoints. This package uses BERT's names, without a prefix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

# Linear layers of attention.
QKV = ("attention.self.query", "attention.self.key", "attention.self.value")
ATTENTION = (*QKV, "attention.output.dense")

# A convolution in the place of attention: its linear layers, and a row of weights for each column.
CONVOLUTION_IN, CONVOLUTION_TAPS, CONVOLUTION_OUT = "convolution.input", "convolution.taps", "convolution.output"
# Inputs of layers in addition to hidden states: a linear layer and a norm make all of them of the embeddings; a layer
# has a gate, a linear layer and a norm for its own, and a factor of its result.
LAYER_INPUTS, LAYER_INPUTS_NORM = "embeddings.layer_inputs", "embeddings.layer_inputs_norm"
INPUT_GATE, INPUT_DENSE, INPUT_NORM = "layer_input.gate", "layer_input.dense", "layer_input.norm"
LAYER_SCALE = "layer_scalar"

WORD_EMBEDDINGS = "embeddings.word_embeddings.weight"
POSITION_EMBEDDINGS = "embeddings.position_embeddings.weight"
TOKEN_TYPE_EMBEDDINGS = "embeddings.token_type_embeddings.weight"  # noqa: S105  # a tensor, not a secret
RELATIVE_ATTENTION_BIAS = "encoder.relative_attention_bias.weight"
RELATIVE_EMBEDDINGS = "encoder.rel_embeddings.weight"  # DeBERTa's name: a row for each distance, or bucket of them
RELATIVE_NORM = "encoder.rel_embeddings.LayerNorm"  # a norm of its rows
POSITION_KEY, POSITION_QUERY = "attention.self.pos_key", "attention.self.pos_query"  # linear layers for its rows
EMBEDDING_PROJECTION = "embeddings_project"  # ELECTRA's name: a linear layer
TABLES = frozenset({WORD_EMBEDDINGS, POSITION_EMBEDDINGS, TOKEN_TYPE_EMBEDDINGS})  # a row for each id
FINAL_NORM = "encoder.LayerNorm"  # a norm; BERT has none
# Norms of a layer that BERT does not have: of queries and keys, and after attention and after the feed-forward network.
QUERY_NORM, KEY_NORM = "attention.self.query_norm", "attention.self.key_norm"
ATTENTION_SUBLAYER_NORM, SUBLAYER_NORM = "attention.output.sublayer_norm", "output.sublayer_norm"
# A layer's router and experts: these have their matrices one below the other, [inner, hidden] each, and share a bias.
ROUTER, EXPERTS_BIAS = "experts.router.weight", "experts.bias"
EXPERTS_INNER, EXPERTS_OUTER = "experts.inner.weight", "experts.outer.weight"

# Checkpoints converted from TensorFlow keep its names for LayerNorm's parameters.
TENSORFLOW_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

LAYER_NUMBER = re.compile(r"^encoder\.layer\.\d+\.")


class FusedWeight(NamedTuple):
    """A matrix that a checkpoint stores together with others, one below the other: rows `part` of `parts`."""

    name: str
    part: int
    parts: int


class StoredName(NamedTuple):
    """A stored tensor, or the rows of one that are `part` of `parts` equal parts."""

    name: str
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class WeightMapping:
    """Mapping of names to those that a model type's checkpoints have."""

    parts: Mapping[str, str | FusedWeight] = field(default_factory=dict)  # parts of BERT's names → the model type's
    prefixes: tuple[str, ...] = ()  # put before every name by checkpoints that hold a task's head too, such as "bert."
    layers: str = "encoder.layer."  # what stands before a layer's number, without a prefix

    def stored_names(self, name: str) -> list[StoredName]:
        """The names under which a checkpoint may store a tensor, most likely first."""
        part, parts = 0, 1

        def stored_name_of(own: re.Match[str]) -> str:
            nonlocal part, parts
            stored = self.parts[own[0]]
            if isinstance(stored, FusedWeight):
                stored, part, parts = stored
            return stored

        if self.parts:  # a part may lie inside a longer one
            own = sorted(self.parts, key=len, reverse=True)
            name = re.sub("|".join(map(re.escape, own)), stored_name_of, name)
        name = name.replace("encoder.layer.", self.layers)
        return [
            StoredName(prefix + alias, part, parts)
            for prefix in ("", *self.prefixes)
            for alias in stored_names_of(name)
        ]


class Classification(NamedTuple):
    """A model type's names of the linear layers of its `…ForSequenceClassification`.

    They take one row of a sequence: out(norm(activation(dense(x)))), or out(x) without `dense`. With pooling "late"
    `dense` takes all rows, and `out` the mean of what it makes of them.
    Those of `…ForTokenClassification` take every row.
    """

    dense: str  # hidden_size → hidden_size; empty: there is none
    out: str  # hidden_size → labels
    activation: str = "tanh"
    norm: str = ""  # a LayerNorm, with the epsilon of the layers' own; empty: none
    pooling: str = "cls"  # the row that they take: the first, the "mean" of all, or the "last-token"'s; or "late"
    out_bias: bool = True
    padding_id: int | None = None  # with "last-token": what transformers takes where config.json states none


# Of nearly all model types, whatever their `…ForSequenceClassification` has.
TOKEN_CLASSIFICATION = Classification(dense="", out="classifier")


@dataclass(frozen=True, slots=True)
class MaskedLM:
    """A model type's names of the tensors of their masked language model's head.

    It computes logits for the vocabulary: norm(activation(transform(x))) · decoderᵀ + bias.
    """

    transform: str  # a linear layer, to the columns of the word table
    norm: str  # a LayerNorm, with the epsilon of the layers' own
    decoder: str  # a linear layer's name; the word table, tied, where a checkpoint does not store its weight
    biases: tuple[str, ...]  # names under which checkpoints store the decoder's bias: the first that is there counts
    activation: str = ""  # as EncoderConfig.activation; empty: the layers' own


@dataclass(frozen=True, slots=True)
class TensorNames:
    """A model type's names of the tensors of `tensor_shapes`."""

    mappings: tuple[WeightMapping, ...]  # the first is HuggingFace's own
    absent: frozenset[str] = frozenset()  # tensors that the model type or its heads do not have: they count as zeros
    masked_lm: MaskedLM | None = None
    classification: Classification | None = None
    token_classification: Classification | None = TOKEN_CLASSIFICATION
    language_model: str | None = None  # the linear layer of a causal language model's logits; None: the type has none
    projection: str = ""  # a linear layer without a bias for every hidden state, where it is stored; empty: none
    tied: bool = True  # whether that is the word table where config.json does not say
    other_heads: Mapping[str, str] = field(default_factory=dict)  # parts of heads' names → what some checkpoints say

    def stored_names(self, name: str) -> list[StoredName]:
        """The names under which a checkpoint may store a tensor, most likely first."""
        return [stored_name for mapping in self.mappings for stored_name in mapping.stored_names(name)]

    def head_names(self, name: str) -> tuple[str, ...]:
        """The names under which a checkpoint may store a head's layer or norm, most likely first."""
        other = name
        for own, stored in self.other_heads.items():
            other = other.replace(own, stored)
        return (name,) if other == name else (name, other)

    def is_absent(self, name: str) -> bool:
        """True if the model type lacks a tensor. Names in `absent` have no "encoder.layer." and no layer number."""
        return name in self.absent or LAYER_NUMBER.sub("", name) in self.absent

    def layer_of(self, stored: str) -> str | None:
        """Part of a stored name after a layer's number: "attention.self.query.weight"; None if it is not a layer's."""
        for mapping in self.mappings:
            for prefix in ("", *mapping.prefixes):
                start = prefix + mapping.layers
                number, _, rest = stored.removeprefix(start).partition(".")
                if stored.startswith(start) and number.isdigit():
                    return rest
        return None


def stored_names_of(name: str) -> list[str]:
    """A tensor's name, and what TensorFlow calls it where that differs."""
    return [name, *(name.replace(new, old) for new, old in TENSORFLOW_NAMES.items() if name.endswith(new))]
