"""What checkpoints call the encoder's tensors. This package calls them by BERT's names, without a prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "POSITION_EMBEDDINGS",
    "RELATIVE_ATTENTION_BIAS",
    "TOKEN_TYPE_EMBEDDINGS",
    "WORD_EMBEDDINGS",
    "Classification",
    "MaskedLM",
    "TensorNames",
    "spellings_of",
]

WORD_EMBEDDINGS = "embeddings.word_embeddings.weight"
POSITION_EMBEDDINGS = "embeddings.position_embeddings.weight"
TOKEN_TYPE_EMBEDDINGS = "embeddings.token_type_embeddings.weight"  # noqa: S105  # a tensor, not a secret
RELATIVE_ATTENTION_BIAS = "encoder.relative_attention_bias.weight"

# Checkpoints converted from TensorFlow keep its names for LayerNorm's parameters.
TENSORFLOW_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


@dataclass(frozen=True, slots=True)
class Classification:
    """What a family's checkpoints call the two linear layers of its `…ForSequenceClassification`.

    They take the first token's row: out(activation(dense(x))).
    """

    dense: str  # hidden_size → hidden_size
    out: str  # hidden_size → labels
    activation: str = "tanh"


@dataclass(frozen=True, slots=True)
class MaskedLM:
    """What a family's checkpoints call the tensors of their masked language model's head.

    It computes logits for the vocabulary: norm(activation(transform(x))) · decoderᵀ + bias.
    """

    transform: str  # a linear layer
    norm: str  # a LayerNorm, with the epsilon of the layers' own
    decoder: str  # a linear layer's name; the word table, tied, where a checkpoint does not store its weight
    biases: tuple[str, ...]  # names under which checkpoints store the decoder's bias: the first that is there counts
    activation: str = ""  # as Architecture.activation; empty: the layers' own


@dataclass(frozen=True, slots=True)
class TensorNames:
    """What a family's checkpoints call the tensors of tensor_shapes.py."""

    prefix: str  # put before every name by checkpoints that hold a task's head too, such as "bert."
    parts: Mapping[str, str] = field(default_factory=dict)  # parts of BERT's names → the family's words for them
    absent: frozenset[str] = frozenset()  # tensors that the family does not have: they count as zeros
    masked_lm: MaskedLM | None = None
    classification: Classification | None = None

    def spellings(self, name: str) -> list[str]:
        """The names under which a checkpoint may store a tensor, the likeliest first."""
        for part in sorted(self.parts, key=len, reverse=True):  # a part may lie inside a longer one
            if part in name:
                name = name.replace(part, self.parts[part])
        names = spellings_of(name)
        return [*names, *(self.prefix + each for each in names)]


def spellings_of(name: str) -> list[str]:
    """A tensor's name, and what TensorFlow calls it where that differs."""
    return [name, *(name.replace(new, old) for new, old in TENSORFLOW_NAMES.items() if name.endswith(new))]
