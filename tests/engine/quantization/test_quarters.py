"""Rows in eight bits by quarters (engine/quantization/blocks.py)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embert.engine.errors import UnsupportedModel
from embert.engine.quantization.blocks import SET, by_quarters, quarter_rows, quarter_weight
from embert.engine.quantization.rows import LEVELS, hadamard, product, quantized_rows, quantized_weight

seeds = st.integers(0, 2**32 - 1)


def drawn(seed: int, rows: int, columns: int) -> np.ndarray:
    """Rows with columns that are far larger than the rest, in float16."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, columns)) * 10.0 ** random.integers(-3, 3, (rows, 1))
    x[:, random.integers(0, columns, 3)] *= 20
    return x.clip(-60000, 60000).astype(np.float16)


def turned(x: np.ndarray) -> np.ndarray:
    """x times the orthogonal matrix, in float64."""
    places = by_quarters(x.shape[1])
    y = np.empty(x.shape, np.float64)
    y[:, places] = x[:, places].astype(np.float64) @ (hadamard(SET) / np.sqrt(SET))
    return y


@pytest.mark.parametrize("columns", [128, 384, 1536, 4096])
def test_each_column_is_in_one_set_with_its_neighbours_and_those_of_other_quarters(columns: int) -> None:
    sets = by_quarters(columns)
    assert sorted(sets.ravel().tolist()) == list(range(columns))
    assert (sets % 8 == np.arange(SET) % 8).all()
    assert (sets // (columns // 4) == np.arange(SET) // 8).all()


@given(seeds)
def test_rows_are_rotated_and_rounded_to_half_an_integer(seed: int) -> None:
    x = drawn(seed, 5, 384)
    x[1] = 0
    found = quarter_rows(x)
    scales = found.scales.astype(np.float64)
    assert (np.abs(found.integers * scales - turned(x)) <= 0.75 * scales).all()  # sums in float16 round, too
    assert found.scales[1] == 0
    largest = np.abs(found.integers.astype(int)).max(1)
    assert largest.tolist() == [LEVELS, 0, LEVELS, LEVELS, LEVELS]


@pytest.mark.parametrize("value", [65504.0, 6e-8, 1e-4, 2.0, 32768.0])
def test_the_largest_and_the_smallest_values_stay_in_range(value: float) -> None:
    x = np.full((1, 128), value, np.float16)
    found = quarter_rows(x)
    assert np.isfinite(found.scales).all()
    assert np.abs(found.integers * found.scales.astype(np.float64) - turned(x)).max() <= max(0.06 * value, 2e-6)


def test_a_product_is_as_near_the_exact_one_as_with_rotations_of_128() -> None:
    x, random = drawn(1, 64, 1024), np.random.default_rng(2)
    weight, bias = random.standard_normal((32, 1024)).astype(np.float32), np.zeros(32, np.float32)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    ours = product(quarter_rows(x), quarter_weight(weight, "w"), bias) - exact
    other = product(quantized_rows(x.astype(np.float32)), quantized_weight(weight, "w"), bias) - exact
    assert np.linalg.norm(ours) < 1.5 * np.linalg.norm(other)
    assert np.linalg.norm(ours) < 0.03 * np.linalg.norm(exact)


def test_a_width_without_whole_blocks_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"multiple of 128 columns; layer\.7\.dense\.weight has 312"):
        quarter_weight(np.zeros((4, 312), np.float32), "layer.7.dense.weight")
