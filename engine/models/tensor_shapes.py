"""The tensors that an encoder needs, and their shapes."""

from __future__ import annotations

from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.models.tensor_names import (
    EMBEDDING_PROJECTION,
    FINAL_NORM,
    POSITION_EMBEDDINGS,
    RELATIVE_ATTENTION_BIAS,
    TOKEN_TYPE_EMBEDDINGS,
    WORD_EMBEDDINGS,
)

__all__ = ["tensor_shapes"]

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
