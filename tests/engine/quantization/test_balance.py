"""Columns balanced before they are rounded: factors by count, and what they are for."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from embert.engine.encoders.self_test import hidden_state, normed_magnitudes, spread_ids
from embert.engine.model import Model
from embert.engine.quantization.blocks import MOST, balance
from embert.engine.weights.checkpoint import Checkpoint


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


@given(st.integers(0, 2**32 - 1), st.floats(0, 12))
def test_factors_are_powers_of_two_within_their_limits(seed: int, spread: float) -> None:
    random = np.random.default_rng(seed)
    magnitudes, weight = (np.exp2(random.normal(0, spread, shape)) for shape in ((64,), (8, 64)))
    factors = balance(magnitudes, weight.astype(np.float32))
    mantissas, _ = np.frexp(factors)
    assert (mantissas == 0.5).all()
    assert ((factors >= 1 / MOST) & (factors <= MOST)).all()


def test_magnitudes_are_those_of_what_layers_multiply(default_model: Model) -> None:
    """Compares the first layer's with the embeddings."""
    config, checkpoint = default_model.config, Checkpoint.open(default_model)
    ids = spread_ids(config, 32)
    assert len(set(ids)) == 32
    found = normed_magnitudes(ids, config, checkpoint)
    parts = ("attention.self.query", "intermediate.dense")
    assert set(found) == {f"encoder.layer.{layer}.{part}" for layer in range(config.layers) for part in parts}
    assert all(each.dtype == np.float64 and each.shape == (config.hidden_size,) for each in found.values())
    first = hidden_state(ids, dataclasses.replace(config, layers=0), checkpoint)
    np.testing.assert_allclose(found["encoder.layer.0.attention.self.query"], np.sqrt(np.square(first).mean(0)), 1e-5)
