"""Properties of int8's definition in numpy, to which every encoder is held: rows, quarters of rows, and blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard as scipys

from embert.engine.errors import UnsupportedModel
from embert.engine.quantization.blocks import (
    INNER,
    SET,
    SPACING,
    block_weight,
    by_quarters,
    quarter_weight,
    stored_order,
)
from embert.engine.quantization.rows import (
    BLOCK,
    LEVELS,
    QuantizedRows,
    QuantizedWeight,
    hadamard,
    product,
    quantized,
    quantized_rows,
    quantized_weight,
    rotated,
    sums,
)
from tests.engine.conftest import Floats
from tests.oracles.int8_rows import LEAST, block_rows, quarter_rows, rounded_blocks

Doubles = npt.NDArray[np.float64]
seeds = st.integers(0, 2**32 - 1)
blocks = st.integers(1, 5)


def drawn(seed: int, rows: int, columns: int) -> Floats:
    """Rows with a few columns that are far larger than the others, as BERT's are."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, columns)).astype(np.float32)
    x[:, random.integers(0, columns, 3)] *= 50
    return x


def drawn_inner(seed: int, rows: int, columns: int) -> npt.NDArray[np.float16]:
    """A quarter of activations as GELU leaves them: a few large ones, the rest near 0."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, columns)) * 4.0 ** random.integers(-3, 3, (rows, 1))
    return np.where(x > 0, x * random.random((rows, columns)) ** 4, -0.05 * np.abs(x)).astype(np.float16)


@given(seeds, blocks)
def test_rotation_is_the_product_with_the_matrix(seed: int, count: int) -> None:
    x = drawn(seed, 3, count * BLOCK)
    exact = x.astype(np.float64).reshape(-1, BLOCK) @ scipys(BLOCK)
    np.testing.assert_allclose(rotated(x).reshape(-1, BLOCK), exact, rtol=0, atol=2e-5 * np.abs(exact).max())


@given(seeds, blocks)
def test_integers_times_scales_are_the_rotated_row(seed: int, count: int) -> None:
    x = drawn(seed, 4, count * BLOCK)
    rows, y = quantized_rows(x), rotated(x) / np.sqrt(np.float32(BLOCK))
    assert (np.abs(rows.integers.astype(int)).max(1) == LEVELS).all()
    assert (np.abs(rows.integers * rows.scales - y) <= 0.501 * rows.scales).all()
    alone = quantized_rows(x[3:4])
    np.testing.assert_array_equal(rows.integers[3:4], alone.integers)
    np.testing.assert_array_equal(rows.scales[3:4], alone.scales)


def test_halves_go_to_the_even_integer() -> None:
    y = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -127, 0]], np.float32)
    assert quantized(y).integers[0].tolist() == [127, 0, 2, 2, 0, -2, -127, 0]


def test_row_of_zeros_has_integers_and_scale_0() -> None:
    x = np.zeros((2, BLOCK), np.float32)
    x[1, 0] = 1
    rows = quantized_rows(x)
    assert not rows.integers[0].any()
    assert rows.scales[0] == 0 < rows.scales[1]


@given(seeds)
def test_weights_are_rotated_and_scaled_by_channel(seed: int) -> None:
    weight = drawn(seed, 6, 2 * BLOCK)
    weight[2] = 0
    found = quantized_weight(weight, "w")
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
    found = product(quantized_rows(x), quantized_weight(weight, "w"), bias)
    assert np.linalg.norm(found - exact) < 0.03 * np.linalg.norm(exact)
    plain = np.rint(x / np.abs(x).max(1, keepdims=True) * 127) * np.abs(x).max(1, keepdims=True) / 127
    assert np.linalg.norm(found - exact) < 0.5 * np.linalg.norm(plain @ weight.T + bias - exact)  # without a rotation


@pytest.mark.parametrize(
    ("x", "quantize", "quantize_weight", "factor"),
    [(drawn(1, 64, 1024).astype(np.float16), quarter_rows, quarter_weight, 1),
     (drawn_inner(1, 64, 1024), block_rows, block_weight, 4)],
    ids=["quarters", "blocks"],
)  # fmt: skip
def test_products_of_parts_are_as_near_as_those_of_whole_rows(
    x: Any, quantize: Callable[[Any], QuantizedRows], quantize_weight: Callable[..., QuantizedWeight], factor: int
) -> None:
    weight = np.random.default_rng(2).standard_normal((32, 1024)).astype(np.float32)
    bias = np.zeros(32, np.float32)
    exact = factor * x.astype(np.float64) @ weight.T.astype(np.float64)
    error = product(quantize(x), quantize_weight(weight, "w"), bias) - exact
    whole = product(quantized_rows(factor * x.astype(np.float32)), quantized_weight(weight, "w"), bias) - exact
    assert np.linalg.norm(error) < 1.5 * np.linalg.norm(whole)
    assert np.linalg.norm(error) < 0.03 * np.linalg.norm(exact)


@pytest.mark.parametrize("quantize_weight", [quantized_weight, quarter_weight, block_weight])
def test_width_without_whole_blocks_is_refused(quantize_weight: Callable[..., QuantizedWeight]) -> None:
    with pytest.raises(UnsupportedModel, match=r"layer\.7\.dense\.weight has 312"):
        quantize_weight(np.zeros((4, 312), np.float32), "layer.7.dense.weight")


def quarters_rotated(x: npt.NDArray[np.float16]) -> Doubles:
    columns = by_quarters(x.shape[1])
    y = np.empty(x.shape, np.float64)
    y[:, columns] = x[:, columns].astype(np.float64) @ (hadamard(SET) / np.sqrt(SET))
    return y


@given(seeds)
def test_quarters_are_rotated_and_rounded(seed: int) -> None:
    random = np.random.default_rng(seed)
    x = (drawn(seed, 5, 384) * 10.0 ** random.integers(-3, 3, (5, 1))).clip(-60000, 60000).astype(np.float16)
    x[1] = 0
    found = quarter_rows(x)
    scales = found.scales.astype(np.float64)
    assert (np.abs(found.integers * scales - quarters_rotated(x)) <= 0.75 * scales).all()  # sums in float16 round, too
    assert found.scales[1] == 0
    assert np.abs(found.integers.astype(int)).max(1).tolist() == [LEVELS, 0, LEVELS, LEVELS, LEVELS]


@pytest.mark.parametrize("value", [65504.0, 6e-8, 1e-4, 2.0, 32768.0])
def test_largest_and_smallest_values_stay_in_range(value: float) -> None:
    x = np.full((1, 128), value, np.float16)
    found = quarter_rows(x)
    assert np.isfinite(found.scales).all()
    error = np.abs(found.integers * found.scales.astype(np.float64) - quarters_rotated(x))
    assert error.max() <= max(0.06 * value, 2e-6)


def blocks_rotated(x: npt.NDArray[np.float16], block: int) -> Doubles:
    """Activations or context times the orthogonal matrix, in the stored order."""
    size = block // SPACING
    sets = (4 if block == INNER else 1) * x.astype(np.float64).reshape(len(x), -1, size, SPACING)
    y = np.einsum("rbic,ij->rbjc", sets, hadamard(size) / np.sqrt(size))
    rows: Doubles = y.reshape(x.shape)[:, stored_order(x.shape[1])]
    return rows


@given(seeds, st.sampled_from([128, 64]))
def test_integers_of_blocks(seed: int, block: int) -> None:
    """A block is rounded by its own maximum; aligned to the row's largest one, integers change by half a step more."""
    x = drawn_inner(seed, 5, 384)
    x[1] = 0
    exact, root = blocks_rotated(x, block), 1 if block == INNER else np.sqrt(block / SPACING)
    each = rounded_blocks(x, block)
    scales = np.repeat(each.maxima.astype(np.float64), block, 1) / LEVELS / root
    assert (np.abs(each.integers * scales - exact) <= 0.75 * scales).all()  # sums in float16 round, too
    assert (each.maxima[1] == LEAST).all()
    assert not each.integers[1].any()
    assert np.abs(each.integers.astype(int)).max() <= LEVELS
    aligned = block_rows(x, block)
    np.testing.assert_allclose(aligned.scales[:, 0], each.maxima.max(1).astype(np.float64) / 127 / root, rtol=1e-6)
    # Half a step for each rounding, and half of a 128th of a block's integers for its factor.
    assert (np.abs(aligned.integers * aligned.scales.astype(np.float64) - exact) <= 1.8 * aligned.scales).all()
