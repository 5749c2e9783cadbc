"""Columns balanced before they are rounded: factors by count, and what they are for."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from embert.engine.encoders.cuda.weights import column_factors
from embert.engine.encoders.self_test import hidden_state, normed_magnitudes, spread_ids
from embert.engine.model import Model
from embert.engine.quantization.blocks import MOST, balance, quarter_rows, quarter_weight
from embert.engine.quantization.rows import product
from embert.engine.weights.checkpoint import Checkpoint


def test_a_factor_is_the_root_of_the_columns_magnitude_over_its_weights() -> None:
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


def test_a_large_column_costs_a_product_less_when_balanced() -> None:
    random = np.random.default_rng(3)
    x = random.standard_normal((200, 384))
    x[:, [5, 100, 301]] *= 30
    weight = (random.standard_normal((128, 384)) / 20).astype(np.float32)
    bias = np.zeros(128, np.float32)
    exact = x @ weight.T.astype(np.float64)
    by = balance(np.sqrt(np.square(x).mean(0)), weight)
    errors = [
        np.linalg.norm(
            product(quarter_rows((x / each).astype(np.float16)), quarter_weight(weight * each, "w"), bias) - exact
        )
        for each in (np.ones(384, np.float32), by)
    ]
    assert errors[1] < 0.75 * errors[0]


def test_magnitudes_are_those_of_what_layers_multiply(default_model: Model) -> None:
    """Of the first layer they are the embeddings' own; all are what float32 computes."""
    config, checkpoint = default_model.config, Checkpoint.open(default_model)
    ids = spread_ids(config, 32)
    assert len(set(ids)) == 32
    found = normed_magnitudes(ids, config, checkpoint)
    parts = ("attention.self.query", "intermediate.dense")
    assert set(found) == {f"encoder.layer.{layer}.{part}" for layer in range(config.layers) for part in parts}
    assert all(each.dtype == np.float64 and each.shape == (config.hidden_size,) for each in found.values())
    first = hidden_state(ids, dataclasses.replace(config, layers=0), checkpoint)
    np.testing.assert_allclose(found["encoder.layer.0.attention.self.query"], np.sqrt(np.square(first).mean(0)), 1e-5)


def test_the_default_models_large_columns_are_balanced(default_model: Model) -> None:
    factors = column_factors(default_model.config, Checkpoint.open(default_model))
    at = "encoder.layer.3.attention.self"
    np.testing.assert_array_equal(factors[f"{at}.query"], factors[f"{at}.value"])
    assert max(each.max() for each in factors.values()) >= 4
    assert np.median(np.concatenate(list(factors.values()))) == 1
