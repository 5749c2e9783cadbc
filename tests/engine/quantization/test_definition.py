"""Properties of the definition that every encoder in eight bits is held to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard as scipys

from embert.engine.errors import UnsupportedModel
from embert.engine.quantization.rows import (
    BLOCK,
    LEVELS,
    QuantizedRows,
    QuantizedWeight,
    hadamard,
    product,
    quantized,
    quantized_blocks,
    quantized_rows,
    quantized_weight,
    rotated,
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


def test_the_matrix_is_sylvesters_in_natural_order() -> None:
    np.testing.assert_array_equal(hadamard(), scipys(BLOCK))


@given(seeds, blocks)
def test_a_rotation_is_the_product_with_the_matrix(seed: int, count: int) -> None:
    x = drawn(seed, 3, count * BLOCK)
    exact = x.astype(np.float64).reshape(-1, BLOCK) @ scipys(BLOCK)
    np.testing.assert_allclose(rotated(x).reshape(-1, BLOCK), exact, rtol=0, atol=2e-5 * np.abs(exact).max())


def test_butterflies_add_neighbours_first() -> None:
    x = np.zeros((1, BLOCK), np.float32)
    x[0, :3] = 2.0**24, 1, 1  # 2²⁴ + 1 is rounded to 2²⁴; with 1 + 1 added first the sum would be 2²⁴ + 2
    x[0, 1], x[0, 2], x[0, 3] = 1, -(2.0**24), 0
    assert rotated(x)[0, 0] == 0  # (2²⁴ + 1) - 2²⁴


@given(seeds, blocks)
def test_twice_rotated_is_128_times_the_row(seed: int, count: int) -> None:
    x = drawn(seed, 2, count * BLOCK)
    np.testing.assert_allclose(rotated(rotated(x)) / BLOCK, x, rtol=0, atol=1e-5 * np.abs(x).max())


@given(seeds, blocks)
def test_integers_times_scales_are_the_rotated_row(seed: int, count: int) -> None:
    x = drawn(seed, 4, count * BLOCK)
    rows, y = quantized_rows(x), rotated(x) / np.sqrt(np.float32(BLOCK))
    assert (np.abs(rows.integers.astype(int)).max(1) == LEVELS).all()
    assert (np.abs(rows.integers * rows.scales - y) <= 0.501 * rows.scales).all()
    each = quantized_blocks(x)
    assert each.scales.shape == (4, count)
    assert (each.scales <= rows.scales * np.float32(1.000001)).all()
    np.testing.assert_array_equal(each.integers[:, :BLOCK], quantized_rows(x[:, :BLOCK]).integers)


def test_halves_go_to_the_even_integer() -> None:
    y = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -127, 0]], np.float32)
    assert quantized(y).integers[0].tolist() == [127, 0, 2, 2, 0, -2, -127, 0]


def test_a_row_of_zeros_has_integers_and_scale_0() -> None:
    x = np.zeros((2, BLOCK), np.float32)
    x[1, 0] = 1
    rows = quantized_rows(x)
    assert not rows.integers[0].any()
    assert rows.scales[0] == 0 < rows.scales[1]


@given(seeds)
def test_a_row_does_not_depend_on_the_others(seed: int) -> None:
    x = drawn(seed, 5, 2 * BLOCK)
    together, alone = quantized_rows(x), quantized_rows(x[3:4])
    np.testing.assert_array_equal(together.integers[3:4], alone.integers)
    np.testing.assert_array_equal(together.scales[3:4], alone.scales)


@given(seeds)
def test_weights_are_rotated_and_scaled_by_channel(seed: int) -> None:
    weight = drawn(seed, 6, 2 * BLOCK)
    weight[2] = 0
    found = quantized_weight(weight, "w")
    turned = (weight.astype(np.float64).reshape(-1, BLOCK) @ scipys(BLOCK) / np.sqrt(BLOCK)).reshape(weight.shape)
    assert not found.integers[2].any()
    assert found.scales[2] == 0
    assert (
        np.abs(found.integers * found.scales[:, None].astype(np.float64) - turned) <= 0.501 * found.scales.max()
    ).all()
    assert (np.delete(np.abs(found.integers.astype(int)).max(1), 2) == LEVELS).all()


def test_sums_are_exact_where_they_are_largest() -> None:
    columns = 32 * BLOCK
    rows = QuantizedRows(np.full((1, columns), 127, np.int8), np.ones((1, 1), np.float32))
    weight = QuantizedWeight(
        np.stack([np.full(columns, 127), np.full(columns, -127)]).astype(np.int8), np.ones(2, np.float32)
    )
    assert sums(rows, weight).tolist() == [[columns * 127**2, -columns * 127**2]]


@pytest.mark.parametrize("quantize", [quantized_rows, quantized_blocks])
def test_a_product_is_near_the_exact_one(quantize: object) -> None:
    x, weight = drawn(1, 8, 3 * BLOCK), drawn(2, 16, 3 * BLOCK)
    bias = drawn(3, 1, 16)[0]
    exact = x.astype(np.float64) @ weight.T + bias
    found = product(quantize(x), quantized_weight(weight, "w"), bias)  # type: ignore[operator]
    assert np.linalg.norm(found - exact) < 0.03 * np.linalg.norm(exact)
    plain = np.rint(x / np.abs(x).max(1, keepdims=True) * 127) * np.abs(x).max(1, keepdims=True) / 127
    assert np.linalg.norm(found - exact) < 0.5 * np.linalg.norm(plain @ weight.T + bias - exact)  # without a rotation


def test_a_width_without_whole_blocks_is_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"multiple of 128 columns; layer\.7\.dense\.weight has 312: use float32"
    ):
        quantized_weight(np.zeros((4, 312), np.float32), "layer.7.dense.weight")
