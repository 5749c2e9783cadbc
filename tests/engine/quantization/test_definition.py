"""Properties of int8's definition in numpy, to which every encoder is held: rows, quarters, blocks, and balance."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard as scipys

from embert.engine.errors import UnsupportedModel
from embert.engine.quantization.blocks import balance, block_weight, quarter_weight
from embert.engine.quantization.rows import (
    BLOCK,
    LEVELS,
    QuantizedRows,
    QuantizedWeight,
    product,
    quantize,
    quantize_rows,
    quantize_weight,
    rotate,
    sums,
)
from tests.engine.conftest import Floats

seeds = st.integers(0, 2**32 - 1)
blocks = st.integers(1, 5)


def drawn(seed: int, rows: int, columns: int) -> Floats:
    """Rows with a few columns that are far larger than the others, as BERT's are."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, columns)).astype(np.float32)
    x[:, random.integers(0, columns, 3)] *= 50
    return x


@given(seeds, blocks)
def test_rotation_is_the_product_with_the_matrix(seed: int, count: int) -> None:
    x = drawn(seed, 3, count * BLOCK)
    exact = x.astype(np.float64).reshape(-1, BLOCK) @ scipys(BLOCK)
    np.testing.assert_allclose(rotate(x).reshape(-1, BLOCK), exact, rtol=0, atol=2e-5 * np.abs(exact).max())


@given(seeds, blocks)
def test_integers_times_scales_are_the_rotated_row(seed: int, count: int) -> None:
    x = drawn(seed, 4, count * BLOCK)
    rows, y = quantize_rows(x), rotate(x) / np.sqrt(np.float32(BLOCK))
    assert (np.abs(rows.integers.astype(int)).max(1) == LEVELS).all()
    assert (np.abs(rows.integers * rows.scales - y) <= 0.501 * rows.scales).all()
    alone = quantize_rows(x[3:4])
    np.testing.assert_array_equal(rows.integers[3:4], alone.integers)
    np.testing.assert_array_equal(rows.scales[3:4], alone.scales)


def test_halves_go_to_the_even_integer() -> None:
    y = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -127, 0]], np.float32)
    assert quantize(y).integers[0].tolist() == [127, 0, 2, 2, 0, -2, -127, 0]


def test_row_of_zeros_has_integers_and_scale_0() -> None:
    x = np.zeros((2, BLOCK), np.float32)
    x[1, 0] = 1
    rows = quantize_rows(x)
    assert not rows.integers[0].any()
    assert rows.scales[0] == 0 < rows.scales[1]


@given(seeds)
def test_weights_are_rotated_and_scaled_by_channel(seed: int) -> None:
    weight = drawn(seed, 6, 2 * BLOCK)
    weight[2] = 0
    found = quantize_weight(weight, "w")
    exact = (weight.astype(np.float64).reshape(-1, BLOCK) @ scipys(BLOCK) / np.sqrt(BLOCK)).reshape(weight.shape)
    assert not found.integers[2].any()
    assert found.scales[2] == 0
    error = np.abs(found.integers * found.scales[:, None].astype(np.float64) - exact)
    assert (error <= 0.501 * found.scales.max()).all()
    assert (np.delete(np.abs(found.integers.astype(int)).max(1), 2) == LEVELS).all()


def test_sums_are_exact_where_they_are_largest() -> None:
    columns = 32 * BLOCK
    rows = QuantizedRows(np.full((1, columns), 127, np.int8), np.ones((1, 1), np.float32))
    weight = QuantizedWeight(
        np.stack([np.full(columns, 127), np.full(columns, -127)]).astype(np.int8), np.ones(2, np.float32)
    )
    assert sums(rows, weight).tolist() == [[columns * 127**2, -columns * 127**2]]


def test_product_is_near_the_exact_one() -> None:
    x, weight = drawn(1, 8, 3 * BLOCK), drawn(2, 16, 3 * BLOCK)
    bias = drawn(3, 1, 16)[0]
    exact = x.astype(np.float64) @ weight.T + bias
    found = product(quantize_rows(x), quantize_weight(weight, "w"), bias)
    assert np.linalg.norm(found - exact) < 0.03 * np.linalg.norm(exact)
    plain = np.rint(x / np.abs(x).max(1, keepdims=True) * 127) * np.abs(x).max(1, keepdims=True) / 127
    assert np.linalg.norm(found - exact) < 0.5 * np.linalg.norm(plain @ weight.T + bias - exact)  # without a rotation


@pytest.mark.parametrize("quantize_weight", [quantize_weight, quarter_weight, block_weight])
def test_width_without_whole_blocks_is_refused(quantize_weight: Callable[..., QuantizedWeight]) -> None:
    with pytest.raises(UnsupportedModel, match=r"layer\.7\.dense\.weight has 312"):
        quantize_weight(np.zeros((4, 312), np.float32), "layer.7.dense.weight")


def test_factor_is_the_root_of_the_columns_magnitude_over_its_weights() -> None:
    magnitudes = np.array([1.0, 16.0, 1.0, 1.0, 64.0])
    weight = np.array([[1.0, 1.0, 16.0, 1.0, 4.0], [-1.0, 1.0, -16.0, 1.0, 4.0]], np.float32)
    found = balance(magnitudes, weight)
    assert found.dtype == np.float32
    # √(1, 16, 1/16, 1, 16) = 1, 4, 1/4, 1, 4, whose mean exponent is 2/5
    np.testing.assert_array_equal(found, np.exp2(np.rint(np.array([0, 2, -2, 0, 2]) - 0.4)))


def test_columns_of_zeros_have_factor_one_and_do_not_count() -> None:
    weight = np.ones((3, 4), np.float32)
    weight[:, 1] = 0
    np.testing.assert_array_equal(balance(np.array([0.0, 5.0, 4.0, 4.0]), weight), np.ones(4))
    np.testing.assert_array_equal(
        balance(np.array([np.nan, np.inf, 4.0, 4.0]), np.ones((3, 4), np.float32)), np.ones(4)
    )
    np.testing.assert_array_equal(balance(np.zeros(4), np.zeros((3, 4), np.float32)), np.ones(4))
