"""FLOPs of an encoder's layers: the matrix products, linear in a text's tokens, and attention, quadratic in them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embert.engine.models.encoder_config import EncoderConfig

__all__ = ["attention_flops", "product_flops"]


def product_flops(config: EncoderConfig) -> int:
    """FLOPs of one token in the matrix products of all layers; a multiplication and an addition are two."""
    attention = (2 * config.heads + 2 * config.kv_heads) * config.head_size
    feed_forward = (3 if config.gated else 2) * config.intermediate_size
    return 2 * config.layers * config.hidden_size * (attention + feed_forward)


def attention_flops(config: EncoderConfig, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """FLOPs of q·k and of the sums of values in all layers, for texts of these lengths, int64 [B].

    Only keys count that a query attends to: those before it in causal layers, those within the window. The products of
    disentangled attention with the rows of distances do not count: how many there are depends on how they are computed.
    """
    pairs = np.zeros_like(lengths)
    for layer in range(config.layers):
        window = config.attention_of(layer).window
        side = lengths if window is None else np.minimum(lengths, window + 1)  # with the query itself
        if config.causal:
            pairs += lengths * side - side * (side - 1) // 2
        else:
            pairs += lengths**2 - (lengths - side) * (lengths - side + 1)
    return 4 * config.heads * config.head_size * pairs
