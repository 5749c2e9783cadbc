"""What an encoder computes: one frozen description that every family's `config.json` becomes."""

from __future__ import annotations

from dataclasses import dataclass, field

from embert.engine.families.tensor_names import TensorNames

__all__ = ["Architecture"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shapes, constants and tensor names of one encoder: BERT's post-norm layers, and how the model differs from BERT.

    Sequences are packed. The embedding of a token is the sum of its rows of the word, position and token-type tables,
    then a LayerNorm. A layer is attention, a LayerNorm, a feed-forward network, a LayerNorm.
    """

    family: str  # `model_type` in config.json, for people to read: no code may depend on it
    vocab_size: int  # rows of the word table
    hidden_size: int  # columns of a hidden state
    layers: int
    heads: int
    intermediate_size: int  # columns inside the feed-forward network
    activation: str  # "gelu" (the exact form, with erf), "gelu_tanh", "relu"
    max_positions: int  # tokens of the longest sequence
    type_vocab_size: int  # rows of the token-type table; 1 where the family has no such table
    layer_norm_eps: float
    tensors: TensorNames = field(repr=False)
    first_position: int = 0  # the row of the stored position table that a sequence's first token takes
    relative_buckets: int = 0  # buckets of distances, each of which adds a bias to attention scores; 0: none

    @property
    def padding_id(self) -> int | None:
        """The padding token's id where padding has a row of the position table to itself; None where it has none.

        Such models start positions at the row after the padding's. HuggingFace gives every token of that id the
        padding's row, also a token that a text spells out, and counts positions over the other tokens only.
        """
        return self.first_position - 1 if self.first_position else None

    @property
    def head_size(self) -> int:
        """Columns of one attention head."""
        return self.hidden_size // self.heads
