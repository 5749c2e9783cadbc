"""FLOPs of an encoder's layers: the matrix products, linear in a text's tokens, and attention, quadratic in them.

Token budgets count both: a long text counts as more tokens than it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from embert.engine.models.encoder_config import EncoderConfig

# Texts of at most this length count as what they have: attention takes little of their time, and most texts are here.
PLAIN_TOKENS = 512


def product_flops(config: EncoderConfig) -> int:
    """FLOPs of one token in the matrix products of all layers; a multiplication and an addition are two."""
    feed_forward, columns = (3 if config.gated else 2) * config.intermediate_size, 0
    for layer in range(config.layers):
        of_layer = config.of_layer(layer)
        if config.attention_of(layer).convolution is None:
            columns += (2 * config.heads + 2 * of_layer.kv_heads) * of_layer.head_size
        else:
            columns += 4 * config.hidden_size
        columns += feed_forward + 3 * config.layer_inputs
    if config.experts is not None:
        columns += len(config.experts.layers) * (feed_forward * (config.experts.top_k - 1) + config.experts.count)
    return 2 * config.hidden_size * columns


Kinds = dict[tuple[int | None, int], int]  # window and columns of a head → layers with attention


def attention_kinds(config: EncoderConfig) -> Kinds:
    """The layers that have attention, by what its FLOPs depend on."""
    kinds = [(config.attention_of(layer), config.of_layer(layer).head_size) for layer in range(config.layers)]
    return Counter((kind.window, size) for kind, size in kinds if kind.convolution is None)


def attention_flops(
    config: EncoderConfig, lengths: npt.NDArray[np.int64], kinds: Kinds | None = None
) -> npt.NDArray[np.int64]:
    """FLOPs of q·k and of the sums of values in all layers, for texts of these lengths, int64 [B].

    Only keys count that a query attends to: those before it in causal layers, those within the window. The products of
    disentangled attention with the rows of distances do not count: how many there are depends on how they are computed.
    `kinds` are those of `attention_kinds`.
    """
    columns = np.zeros_like(lengths)  # of one head, for all pairs
    for (window, size), layers in (attention_kinds(config) if kinds is None else kinds).items():
        side = lengths if window is None else np.minimum(lengths, window + 1)  # with the query itself
        if config.causal:
            columns += layers * size * (lengths * side - side * (side - 1) // 2)
        else:
            columns += layers * size * (lengths**2 - (lengths - side) * (lengths - side + 1))
    return 4 * config.heads * columns


class TokenCounts:
    """Cost of texts in token budgets: their tokens, and for long ones attention's part in the same unit.

    A text of n tokens counts as n + (A(n) - n · A(m) / m) / P, for A its attention, m PLAIN_TOKENS and P the products
    of a token, all in FLOPs. Without windows that is n · (1 + (n - m) / n0), where n0 tokens have as much of both.
    """

    def __init__(self, config: EncoderConfig) -> None:
        self._config, self._products = config, product_flops(config) or 1  # without layers tokens are all that counts
        self._kinds = attention_kinds(config)
        self._usual = int(attention_flops(config, np.array([PLAIN_TOKENS]), self._kinds)[0])

    def of(self, lengths: Sequence[int]) -> list[int]:
        """Cost of texts of these lengths, each at least its length."""
        tokens = np.array(lengths, np.int64)
        surplus = attention_flops(self._config, tokens, self._kinds) - tokens * self._usual // PLAIN_TOKENS
        counts = tokens + np.maximum(surplus, 0) // self._products
        return [int(count) for count in np.where(tokens > PLAIN_TOKENS, counts, tokens)]
