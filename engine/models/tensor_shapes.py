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


def tensor_shapes(architecture: EncoderConfig) -> Shapes:
    """BERT's name of each tensor, without a prefix → its shape, [out, in] for a weight.

    For every family, row i of the position table is the sequence's token i, and there is a table of token types. Layers
    that share weights name the same tensors: "encoder.layer.0." of ALBERT is every layer's.
    """
    hidden, columns = architecture.hidden_size, architecture.embedding_columns
    shapes: Shapes = {WORD_EMBEDDINGS: (architecture.vocab_size, columns)}
    if architecture.position_table:
        shapes[POSITION_EMBEDDINGS] = (architecture.max_positions, columns)
    shapes[TOKEN_TYPE_EMBEDDINGS] = (architecture.type_vocab_size, columns)
    shapes |= _norm("embeddings.LayerNorm", columns)
    if architecture.embedding_size is not None:
        shapes |= _linear(EMBEDDING_PROJECTION, hidden, columns)
    if architecture.relative_buckets:
        shapes[RELATIVE_ATTENTION_BIAS] = (architecture.relative_buckets, architecture.heads)
    for layer in range(architecture.layers):
        prefix = f"encoder.layer.{architecture.stored_layer(layer)}."
        if prefix + "output.dense.weight" not in shapes:
            shapes |= {prefix + name: shape for name, shape in _layer(architecture, layer).items()}
    if architecture.pre_norm:
        shapes |= _norm(FINAL_NORM, hidden)
    return shapes


def _layer(architecture: EncoderConfig, layer: int) -> Shapes:
    """The tensors of one layer. A norm has the same name whether it comes before attention or after."""
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    shapes: Shapes = {}
    for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
        shapes |= _linear(name, hidden, hidden)
    if architecture.gated:
        shapes |= _linear("intermediate.gate", inner, hidden)
    shapes |= _linear("intermediate.dense", inner, hidden)
    shapes |= _linear("output.dense", hidden, inner)
    if architecture.has_attention_norm(layer):
        shapes |= _norm("attention.output.LayerNorm", hidden)
    return shapes | _norm("output.LayerNorm", hidden)


def _linear(name: str, out: int, columns: int) -> Shapes:
    return {f"{name}.weight": (out, columns), f"{name}.bias": (out,)}


def _norm(name: str, columns: int) -> Shapes:
    return {f"{name}.weight": (columns,), f"{name}.bias": (columns,)}
