"""FLOPs of a model's layers, compared with counts by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from embert.engine import load_model
from embert.engine.models.encoder_config import Attention, Convolution
from embert.engine.models.flops import attention_flops, product_flops


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_the_keys_that_a_query_sees(causal: bool) -> None:
    windows = [None, 0, 1, 5]
    config = replace(
        load_model().config, layers=4, attention=tuple(Attention(window=each) for each in windows), causal=causal
    )
    lengths = [1, 2, 6, 7, 20]
    pairs = [
        sum(
            (window is None or abs(query - key) <= window) and not (causal and key > query)
            for window, query, key in product(windows, range(length), range(length))
        )
        for length in lengths
    ]
    expected = np.array(pairs) * 2 * 2 * config.heads * config.head_size
    np.testing.assert_array_equal(attention_flops(config, np.array(lengths)), expected)


def test_products_are_those_of_the_weights() -> None:
    """MiniLM-L6; then heads of 64 columns that share keys and values by four, and gates."""
    config = load_model().config
    assert product_flops(config) == 2 * 6 * (4 * 384 * 384 + 2 * 384 * 1536)
    shared = replace(config, head_columns=64, key_value_heads=3, gated=True)
    assert product_flops(shared) == 2 * 6 * 384 * (2 * 12 * 64 + 2 * 3 * 64 + 3 * 1536)
    kinds = (Attention(head_columns=64, key_value_heads=3), Attention(convolution=Convolution(3)))
    mixed = replace(config, attention=kinds * 3, layer_inputs=10)
    columns = 2 * 12 * 64 + 2 * 3 * 64 + 4 * 384 + 2 * (2 * 1536 + 3 * 10)
    assert product_flops(mixed) == 2 * 3 * 384 * columns
    pairs = 3 * 9 * 9  # of tokens in the layers with attention
    np.testing.assert_array_equal(attention_flops(mixed, np.array([9])), [2 * 2 * 12 * 64 * pairs])
