"""Inner rows in eight bits, a block at a time (engine/quantization/blocks.py)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embert.engine.errors import UnsupportedModel
from embert.engine.quantization.blocks import (
    INNER,
    LEAST,
    SPACING,
    aligned_rows,
    block_rows,
    block_weight,
    rounded_blocks,
    stored_order,
)
from embert.engine.quantization.rows import LEVELS, hadamard, product, quantized_rows, quantized_weight

seeds = st.integers(0, 2**32 - 1)


def drawn(seed: int, rows: int, columns: int) -> np.ndarray:
    """A quarter of activations as GELU leaves them: a few large ones, the rest near 0."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, columns)) * 4.0 ** random.integers(-3, 3, (rows, 1))
    made: np.ndarray = np.where(x > 0, x * random.random((rows, columns)) ** 4, -0.05 * np.abs(x)).astype(np.float16)
    return made


def turned(x: np.ndarray, block: int) -> np.ndarray:
    """Activations or context times the orthogonal matrix, in float64 and in the stored order."""
    rotated = block // SPACING
    sets = (4 if block == INNER else 1) * x.astype(np.float64).reshape(len(x), -1, rotated, SPACING)
    y = np.einsum("rbic,ij->rbjc", sets, hadamard(rotated) / np.sqrt(rotated))
    found: np.ndarray = y.reshape(x.shape)[:, stored_order(x.shape[1])]
    return found


@pytest.mark.parametrize("columns", [128, 384, 4096])
def test_each_column_is_stored_once_and_beside_the_15_around_it(columns: int) -> None:
    order = stored_order(columns)
    assert sorted(order.tolist()) == list(range(columns))
    assert (order // 16 == np.arange(columns) // 16).all()


blocks_of = st.sampled_from([128, 64])


@given(seeds, blocks_of)
def test_integers_of_a_block_are_rounded_by_its_maximum(seed: int, block: int) -> None:
    x = drawn(seed, 5, 384)
    x[1] = 0
    blocks = rounded_blocks(x, block)
    root = 1 if block == INNER else np.sqrt(block / SPACING)
    scales = np.repeat(blocks.maxima.astype(np.float64), block, 1) / LEVELS / root
    error = np.abs(blocks.integers * scales - turned(x, block))
    assert (error <= 0.75 * scales).all()  # sums in float16 round, too
    assert (blocks.maxima[1] == LEAST).all()
    assert not blocks.integers[1].any()
    assert np.abs(blocks.integers.astype(int)).max() <= LEVELS


@given(seeds, blocks_of)
def test_aligned_integers_are_those_of_the_rows_largest_maximum(seed: int, block: int) -> None:
    x = drawn(seed, 5, 512)
    found = block_rows(x, block)
    root = 1 if block == INNER else np.sqrt(block / SPACING)
    largest = rounded_blocks(x, block).maxima.max(1).astype(np.float64)
    np.testing.assert_allclose(found.scales[:, 0], largest / 127 / root, rtol=1e-6)
    # Half a step for each rounding, and half of a 128th of a block's integers for its factor.
    assert (np.abs(found.integers * found.scales.astype(np.float64) - turned(x, block)) <= 1.8 * found.scales).all()


def test_a_block_at_the_rows_maximum_keeps_its_integers() -> None:
    x = drawn(3, 64, 512)
    blocks = rounded_blocks(x)
    largest = np.repeat(blocks.maxima == blocks.maxima.max(1, keepdims=True), INNER, 1)
    assert (aligned_rows(blocks).integers == blocks.integers)[largest].all()


def test_a_product_is_nearly_as_near_the_exact_one_as_with_a_scale_a_row() -> None:
    x, random = drawn(1, 64, 1024), np.random.default_rng(2)
    weight, bias = random.standard_normal((32, 1024)).astype(np.float32), np.zeros(32, np.float32)
    exact = 4 * x.astype(np.float64) @ weight.T.astype(np.float64)
    ours = product(block_rows(x), block_weight(weight, "w"), bias) - exact
    other = product(quantized_rows(4 * x.astype(np.float32)), quantized_weight(weight, "w"), bias) - exact
    assert np.linalg.norm(ours) < 1.5 * np.linalg.norm(other)
    assert np.linalg.norm(ours) < 0.03 * np.linalg.norm(exact)


def test_a_width_without_whole_blocks_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"multiple of 128 columns; layer\.7\.dense\.weight has 312"):
        block_weight(np.zeros((4, 312), np.float32), "layer.7.dense.weight")
