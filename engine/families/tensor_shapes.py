"""The tensors that an encoder needs, and their shapes."""

from __future__ import annotations

from embert.engine.families.architecture import Architecture
from embert.engine.families.tensor_names import (
    POSITION_EMBEDDINGS,
    RELATIVE_ATTENTION_BIAS,
    TOKEN_TYPE_EMBEDDINGS,
    WORD_EMBEDDINGS,
)

__all__ = ["tensor_shapes"]


def tensor_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """BERT's name of each tensor, without a prefix → its shape, [out, in] for a weight.

    For every family, row i of the position table is the sequence's token i, and there is a table of token types.
    """
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        WORD_EMBEDDINGS: (architecture.vocab_size, hidden),
        POSITION_EMBEDDINGS: (architecture.max_positions, hidden),
        TOKEN_TYPE_EMBEDDINGS: (architecture.type_vocab_size, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    linear = {
        "attention.self.query": (hidden, hidden),
        "attention.self.key": (hidden, hidden),
        "attention.self.value": (hidden, hidden),
        "attention.output.dense": (hidden, hidden),
        "intermediate.dense": (inner, hidden),
        "output.dense": (hidden, inner),
    }
    if architecture.relative_buckets:
        shapes[RELATIVE_ATTENTION_BIAS] = (architecture.relative_buckets, architecture.heads)
    for layer in range(architecture.layers):
        prefix = f"encoder.layer.{layer}."
        for name, shape in linear.items():
            shapes[f"{prefix}{name}.weight"] = shape
            shapes[f"{prefix}{name}.bias"] = shape[:1]
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{prefix}{name}.weight"] = shapes[f"{prefix}{name}.bias"] = (hidden,)
    return shapes
