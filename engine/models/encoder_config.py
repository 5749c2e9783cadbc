"""What an encoder computes: one frozen description that every model type's `config.json` becomes, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from embert.engine.models.tensor_names import (
    EMBEDDING_PROJECTION,
    FINAL_NORM,
    POSITION_EMBEDDINGS,
    RELATIVE_ATTENTION_BIAS,
    TOKEN_TYPE_EMBEDDINGS,
    WORD_EMBEDDINGS,
    TensorNames,
)

__all__ = ["Adapters", "Attention", "DynamicNtk", "EncoderConfig", "Ntk", "Rotary", "tensor_shapes"]


@dataclass(frozen=True, slots=True)
class Ntk:
    """Rotary positions stretched for texts `factor` times as long as those that the model was first trained on."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicNtk:
    """The same, by the length of each text: texts of up to `trained` tokens are not stretched."""

    factor: float
    trained: int


@dataclass(frozen=True, slots=True)
class Rotary:
    """RoPE: queries and keys are rotated by angles that grow with the position: see ../encoders/positions.py."""

    theta: float  # the base of the angles' frequencies
    columns: int  # of each head that are rotated, the first ones
    scaling: Ntk | DynamicNtk | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one layer: its rotary positions and its window."""

    rotary: Rotary | None = None
    window: int | None = None  # a token sees as many tokens on each side of itself; None: all


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank additions to the linear layers and tables, of which a request chooses one: y += scale · B·(A·x)."""

    names: tuple[str, ...]  # what requests call them, in the order of the checkpoint
    rank: int
    scale: float
    prompts: tuple[tuple[str, str], ...] = ()  # a name → the text that is put before a request's texts
    folders: tuple[str, ...] = ()  # of each, beside the weights; empty: they are stored with the weights

    def number(self, name: str | None) -> int:
        """The place of an adapter in `names`; -1 for any other name."""
        return self.names.index(name) if name in self.names else -1


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Shapes, constants and tensor names of one encoder: BERT's post-norm layers, and how the model differs from BERT.

    Sequences are packed. The embedding of a token is the sum of its rows of the word, position and token-type tables,
    then a norm, then a projection where the tables are narrower than the layers. A layer is attention and a
    feed-forward network, each of which adds to the row that it was given. Norms follow these sums; with `pre_norm` they
    come before attention and before the feed-forward network, and one more follows the last layer.
    """

    model_type: str  # for people to read: no code may depend on it
    vocab_size: int  # rows of the word table
    hidden_size: int  # columns of a hidden state
    layers: int
    heads: int
    intermediate_size: int  # columns inside the feed-forward network
    activation: str  # "gelu" (the exact form, with erf), "gelu_tanh", "relu", "silu"
    max_positions: int  # tokens of the longest sequence
    type_vocab_size: int  # rows of the token-type table; 1 where the model type has no such table
    layer_norm_eps: float
    tensors: TensorNames = field(repr=False)
    first_position: int = 0  # the row of the stored position table that a sequence's first token takes
    position_table: bool = True  # positions have rows of a table
    relative_buckets: int = 0  # buckets of distances, each of which adds a bias to attention scores; 0: none
    alibi: bool = False  # scores fall with the distance, in each head by a slope of its own
    attention: tuple[Attention, ...] = ()  # of each layer; empty: plain in all
    gated: bool = False  # the feed-forward network multiplies by a gate: activation(gate·x) · (dense·x)
    rms_norm: bool = False  # norms do not subtract the mean
    pre_norm: bool = False
    first_norm: bool = True  # with `pre_norm`: a norm comes before the first layer's attention
    embedding_size: int | None = None  # columns of the embedding tables where a projection follows them; None: none
    shared_layers: tuple[int, ...] = ()  # of each layer, the number under which its weights are stored; empty: its own
    adapters: Adapters | None = None

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

    @property
    def embedding_columns(self) -> int:
        """Columns of the embedding tables."""
        return self.embedding_size or self.hidden_size

    def attention_of(self, layer: int) -> Attention:
        """The positions and the window of a layer's attention."""
        return self.attention[layer] if self.attention else Attention()

    def stored_layer(self, layer: int) -> int:
        """The number under which a layer's weights are stored."""
        return self.shared_layers[layer] if self.shared_layers else layer

    def has_attention_norm(self, layer: int) -> bool:
        """Whether a layer has a norm with its attention."""
        return layer > 0 or self.first_norm


Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(encoder_config: EncoderConfig) -> Shapes:
    """BERT's name of each tensor, without a prefix → its shape, [out, in] for a weight.

    Row i of the position table is the sequence's token i, and there is a table of token types. Layers that
     share weights name the same tensors: "encoder.layer.0." of ALBERT is every layer's.
    """
    hidden, columns = encoder_config.hidden_size, encoder_config.embedding_columns
    shapes: Shapes = {WORD_EMBEDDINGS: (encoder_config.vocab_size, columns)}
    if encoder_config.position_table:
        shapes[POSITION_EMBEDDINGS] = (encoder_config.max_positions, columns)
    shapes[TOKEN_TYPE_EMBEDDINGS] = (encoder_config.type_vocab_size, columns)
    shapes |= _norm("embeddings.LayerNorm", columns)
    if encoder_config.embedding_size is not None:
        shapes |= _linear(EMBEDDING_PROJECTION, hidden, columns)
    if encoder_config.relative_buckets:
        shapes[RELATIVE_ATTENTION_BIAS] = (encoder_config.relative_buckets, encoder_config.heads)
    for layer in range(encoder_config.layers):
        prefix = f"encoder.layer.{encoder_config.stored_layer(layer)}."
        if prefix + "output.dense.weight" not in shapes:
            shapes |= {prefix + name: shape for name, shape in _layer(encoder_config, layer).items()}
    if encoder_config.pre_norm:
        shapes |= _norm(FINAL_NORM, hidden)
    return shapes


def _layer(encoder_config: EncoderConfig, layer: int) -> Shapes:
    """The tensors of one layer. A norm has the same name whether it comes before attention or after."""
    hidden, inner = encoder_config.hidden_size, encoder_config.intermediate_size
    shapes: Shapes = {}
    for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
        shapes |= _linear(name, hidden, hidden)
    if encoder_config.gated:
        shapes |= _linear("intermediate.gate", inner, hidden)
    shapes |= _linear("intermediate.dense", inner, hidden)
    shapes |= _linear("output.dense", hidden, inner)
    if encoder_config.has_attention_norm(layer):
        shapes |= _norm("attention.output.LayerNorm", hidden)
    return shapes | _norm("output.LayerNorm", hidden)


def _linear(name: str, out: int, columns: int) -> Shapes:
    return {f"{name}.weight": (out, columns), f"{name}.bias": (out,)}


def _norm(name: str, columns: int) -> Shapes:
    return {f"{name}.weight": (columns,), f"{name}.bias": (columns,)}
