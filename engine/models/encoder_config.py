"""Description of an encoder's computation, frozen, that every model type's `config.json` becomes, and its tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from embert.engine.models import tensor_names as tn
from embert.engine.models.tensor_names import TensorNames


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
class Linear:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3:
    """Frequencies of long waves divided by `factor`, those of short waves kept, and a ramp between the two."""

    factor: float
    low_freq_factor: float  # waves longer than trained / low_freq_factor are long
    high_freq_factor: float  # waves shorter than trained / high_freq_factor are short
    trained: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (Peng et al., 2023): a ramp from kept to divided frequencies, and cosines and sines times a constant."""

    factor: float
    trained: int
    attention_factor: float  # of cosines and sines
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # the ramp's ends are whole pairs


@dataclass(frozen=True, slots=True)
class Rotary:
    """RoPE: queries and keys are rotated by angles that grow with the position: see ../encoders/positions.py."""

    theta: float  # the base of the angles' frequencies
    columns: int  # of each head that are rotated, the first ones
    scaling: Ntk | DynamicNtk | Linear | Llama3 | Yarn | None = None


@dataclass(frozen=True, slots=True)
class Convolution:
    """A gated short convolution: c · convolved(b · x), each column by its taps, with zeros around the rows of a text.

    A linear layer makes b, c and x of the layer's input.
    """

    taps: int  # rows that each row sees, itself included
    after: int = 0  # of these, rows after it


@dataclass(frozen=True, slots=True)
class Attention:
    """The operation of a layer that mixes the rows of a text: attention with its positions, or a convolution."""

    rotary: Rotary | None = None
    window: int | None = None  # a token sees as many tokens on each side that it sees at all; None: all
    convolution: Convolution | None = None  # in the place of attention
    head_columns: int | None = None  # as in EncoderConfig, where this layer differs
    key_value_heads: int | None = None  # likewise


@dataclass(frozen=True, slots=True)
class Disentangled:
    """Disentangled attention (He et al., "DeBERTa", 2021): scores have parts by distance, learned in a table of rows.

    The score of query i and key j is scale · (q[i]·k[j] + q[i]·K[r] + Q[r]·k[j]). Row r of the table belongs to the
    distance i - j (encoders/positions.py); linear layers of each layer make K and Q of the table.
    """

    buckets: int  # rows of either side; the farther half of the distances share them by their logarithm; 0: no buckets
    farthest: int  # the distance from which on all share the last row
    content_to_position: bool  # scores have q·K
    position_to_content: bool  # scores have Q·k
    shared: bool  # K and Q are made by the linear layers of keys and queries, not by separate ones
    norm: bool  # a norm of the table's rows comes first

    @property
    def span(self) -> int:
        """Rows of either side: the table has twice as many, and distance 0 has row `span`."""
        return self.buckets or self.farthest


@dataclass(frozen=True, slots=True)
class LongQueries:
    """Queries of tokens at position `trained` and after are multiplied by 1 + beta · ln(1 + ⌊position / trained⌋)."""

    beta: float
    trained: int  # tokens of texts without such a factor


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed feed-forward networks: Σ p[e] · outer[e] · activation(inner[e] · x) + bias over the `top_k` largest p[e].

    p is the softmax of the router's product with the row, over all experts.
    """

    count: int
    top_k: int
    layers: tuple[int, ...]  # that have experts instead of one network


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank additions to the linear layers and tables, of which a request chooses one: y += scale · B·(A·x)."""

    names: tuple[str, ...]  # what requests call them, in the order of the checkpoint
    rank: int
    scale: float
    prompts: tuple[tuple[str, str], ...] = ()  # a name → the text that is put before a request's texts
    default: str | None = None  # the one of requests that choose none; None: the model's own weights
    names_prompts: bool = True  # an adapter's name is also a prompt's
    folders: tuple[str, ...] = ()  # of each, next to the weights; empty: they are stored with the weights

    def number(self, name: str | None) -> int:
        """The index of an adapter in `names`; -1 for any other name."""
        return self.names.index(name) if name in self.names else -1


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Shapes, constants and tensor names of one encoder: BERT's post-norm layers, and how the model differs from BERT.

    Sequences are packed. The embedding of a token is the sum of its rows of the word, position and token-type tables,
    then a norm, then a projection where the tables are narrower than the layers. A layer is attention and a
    feed-forward network, each of which adds to the row that it was given. Norms follow these sums; with `pre_norm` they
    come before attention and before the feed-forward network, and one more follows the last layer. Decoders are
    described too: a text is one forward pass, without a KV cache.
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
    alibi: bool = False  # scores fall with the distance, by a different slope in each head
    disentangled: Disentangled | None = None  # scores have learned parts by distance; None: none
    attention: tuple[Attention, ...] = ()  # of each layer; empty: plain in all
    gated: bool = False  # the feed-forward network multiplies by a gate: activation(gate·x) · (dense·x)
    rms_norm: bool = False  # norms do not subtract the mean
    pre_norm: bool = False
    first_norm: bool = True  # with `pre_norm`: a norm comes before the first layer's attention
    sublayer_norms: bool = False  # with `pre_norm`: a norm also comes after each, before its result is added
    norm_offset: float = 0.0  # is added to the stored gamma of norms
    embedding_norm: bool = True  # a norm follows the sum of the embedding tables
    projects_first: bool = False  # that norm follows the projection of the tables' rows, not the sum
    embedding_scale: float = 1.0  # the word table's rows are multiplied by it
    continues: bool = False  # rows are the last ones of another encoder, each with a row of the token-type table added
    causal: bool = False  # a token attends to itself and to tokens before it only
    key_value_heads: int | None = None  # heads of keys and values, each shared by several of the queries; None: `heads`
    head_columns: int | None = None  # columns of one attention head; None: hidden_size / heads
    qk_norm: bool = False  # an RMSNorm of each head's queries and keys, before they are rotated
    value_norm: bool = False  # with `qk_norm`: values too, without a weight
    attention_scale: float | None = None  # of scores; None: 1 / sqrt(head_size)
    long_queries: LongQueries | None = None  # a factor of queries by their position; None: none
    layer_inputs: int = 0  # columns of each layer's own input, which gates a third part of the layer; 0: none
    wide_range: bool = False  # hidden states of trained models exceed float16's largest number
    embedding_size: int | None = None  # columns of the embedding tables where a projection follows them; None: none
    shared_layers: tuple[int, ...] = ()  # of each layer, the number under which its weights are stored; empty: its own
    adapters: Adapters | None = None
    experts: Experts | None = None

    @property
    def padding_id(self) -> int | None:
        """The padding token's id where padding has a row of the position table to itself; None where it has none.

        Such models start positions at the row after the padding's. HuggingFace gives every token of that id the
        padding's row, also a token that a text spells out, and counts positions over the other tokens only.
        """
        return self.first_position - 1 if self.first_position else None

    @property
    def head_size(self) -> int:
        return self.head_columns or self.hidden_size // self.heads

    @property
    def kv_heads(self) -> int:
        return self.key_value_heads or self.heads

    @property
    def score_scale(self) -> float:
        return self.head_size**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def is_decoder(self) -> bool:
        """True if attention is causal, has grouped heads, or normalizes queries and keys."""
        plain = self.kv_heads == self.heads and self.head_size * self.heads == self.hidden_size
        return self.causal or self.qk_norm or not plain

    @property
    def embedding_columns(self) -> int:
        return self.embedding_size or self.hidden_size

    def attention_of(self, layer: int) -> Attention:
        """The positions and the window of a layer's attention."""
        return self.attention[layer] if self.attention else Attention()

    def with_tensors(self, **changes: Any) -> EncoderConfig:
        """Replaces fields of `tensors`."""
        return dataclasses.replace(self, tensors=dataclasses.replace(self.tensors, **changes))

    def of_layer(self, layer: int) -> EncoderConfig:
        """Returns the config with the heads of one layer."""
        kind = self.attention_of(layer)
        if kind.head_columns is None and kind.key_value_heads is None:
            return self
        return dataclasses.replace(
            self,
            head_columns=kind.head_columns or self.head_columns,
            key_value_heads=kind.key_value_heads or self.key_value_heads,
        )

    def stored_layer(self, layer: int) -> int:
        """The number under which a layer's weights are stored."""
        return self.shared_layers[layer] if self.shared_layers else layer

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a layer; None if it has one feed-forward network."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    def has_attention_norm(self, layer: int) -> bool:
        """True if a layer has a norm with its attention."""
        return layer > 0 or self.first_norm


def position_bytes(encoder_config: EncoderConfig) -> int:
    """Bytes of the tables that are made for positions, not stored: of rotations, and of biases or rows by distance."""
    rotary = {kind.rotary for kind in encoder_config.attention if kind.rotary is not None}
    biases = encoder_config.heads if encoder_config.alibi or encoder_config.relative_buckets else 0
    rows = 0 if encoder_config.disentangled is None else 2  # of 8 bytes
    return 4 * encoder_config.max_positions * (sum(kind.columns for kind in rotary) + 2 * (biases + rows))


Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(encoder_config: EncoderConfig) -> Shapes:
    """BERT's name of each tensor, without a prefix → its shape, [out, in] for a weight.

    Row i of the position table is the sequence's token i, and there is a table of token types. Layers that
     share weights name the same tensors: "encoder.layer.0." of ALBERT is every layer's.
    """
    hidden, columns = encoder_config.hidden_size, encoder_config.embedding_columns
    shapes: Shapes = {tn.WORD_EMBEDDINGS: (encoder_config.vocab_size, columns)}
    if encoder_config.position_table:
        shapes[tn.POSITION_EMBEDDINGS] = (encoder_config.max_positions, columns)
    shapes[tn.TOKEN_TYPE_EMBEDDINGS] = (encoder_config.type_vocab_size, columns)
    if encoder_config.embedding_norm:
        shapes |= _norm("embeddings.LayerNorm", hidden if encoder_config.projects_first else columns)
    if encoder_config.embedding_size is not None:
        shapes |= _linear(tn.EMBEDDING_PROJECTION, hidden, columns)
    if encoder_config.layer_inputs:
        shapes |= _linear(tn.LAYER_INPUTS, encoder_config.layers * encoder_config.layer_inputs, hidden)
        shapes |= _norm(tn.LAYER_INPUTS_NORM, encoder_config.layer_inputs)
    if encoder_config.relative_buckets:
        shapes[tn.RELATIVE_ATTENTION_BIAS] = (encoder_config.relative_buckets, encoder_config.heads)
    if encoder_config.disentangled is not None:
        shapes[tn.RELATIVE_EMBEDDINGS] = (2 * encoder_config.disentangled.span, hidden)
        if encoder_config.disentangled.norm:
            shapes |= _norm(tn.RELATIVE_NORM, hidden)
    for layer in range(encoder_config.layers):
        prefix = f"encoder.layer.{encoder_config.stored_layer(layer)}."
        if prefix + "output.LayerNorm.weight" not in shapes:
            shapes |= {prefix + name: shape for name, shape in _layer(encoder_config, layer).items()}
    if encoder_config.pre_norm:
        shapes |= _norm(tn.FINAL_NORM, hidden)
    return shapes


def _layer(encoder_config: EncoderConfig, layer: int) -> Shapes:
    """The tensors of one layer. A norm has the same name whether it comes before attention or after."""
    hidden, inner = encoder_config.hidden_size, encoder_config.intermediate_size
    convolution = encoder_config.attention_of(layer).convolution
    if convolution is None:
        shapes = _attention(encoder_config.of_layer(layer))
    else:
        shapes = _linear(tn.CONVOLUTION_IN, 3 * hidden, hidden) | _linear(tn.CONVOLUTION_OUT, hidden, hidden)
        shapes |= {
            f"{tn.CONVOLUTION_TAPS}.weight": (hidden, 1, convolution.taps),
            f"{tn.CONVOLUTION_TAPS}.bias": (hidden,),
        }
    if experts := encoder_config.experts_of(layer):
        shapes |= dict.fromkeys((tn.EXPERTS_INNER, tn.EXPERTS_OUTER), (experts.count * inner, hidden))
        shapes |= {tn.ROUTER: (experts.count, hidden), tn.EXPERTS_BIAS: (hidden,)}
    else:
        if encoder_config.gated:
            shapes |= _linear("intermediate.gate", inner, hidden)
        shapes |= _linear("intermediate.dense", inner, hidden) | _linear("output.dense", hidden, inner)
    if encoder_config.has_attention_norm(layer):
        shapes |= _norm("attention.output.LayerNorm", hidden)
    if encoder_config.sublayer_norms:
        shapes |= _norm(tn.ATTENTION_SUBLAYER_NORM, hidden) | _norm(tn.SUBLAYER_NORM, hidden)
    if columns := encoder_config.layer_inputs:
        shapes |= _linear(tn.INPUT_GATE, columns, hidden) | _linear(tn.INPUT_DENSE, hidden, columns)
        shapes |= _norm(tn.INPUT_NORM, hidden) | {tn.LAYER_SCALE: (1,)}
    return shapes | _norm("output.LayerNorm", hidden)


def _attention(encoder_config: EncoderConfig) -> Shapes:
    """The linear layers and norms of one layer's attention."""
    hidden, size = encoder_config.hidden_size, encoder_config.head_size
    shapes = _linear("attention.self.query", encoder_config.heads * size, hidden)
    for name in ("attention.self.key", "attention.self.value"):
        shapes |= _linear(name, encoder_config.kv_heads * size, hidden)
    if encoder_config.qk_norm:
        shapes |= {f"{name}.weight": (size,) for name in (tn.QUERY_NORM, tn.KEY_NORM)}
    relative = encoder_config.disentangled
    if relative is not None and not relative.shared:
        if relative.content_to_position:
            shapes |= _linear(tn.POSITION_KEY, encoder_config.heads * size, hidden)
        if relative.position_to_content:
            shapes |= _linear(tn.POSITION_QUERY, encoder_config.heads * size, hidden)
    return shapes | _linear("attention.output.dense", hidden, encoder_config.heads * size)


def _linear(name: str, out: int, columns: int) -> Shapes:
    return {f"{name}.weight": (out, columns), f"{name}.bias": (out,)}


def _norm(name: str, columns: int) -> Shapes:
    return {f"{name}.weight": (columns,), f"{name}.bias": (columns,)}
