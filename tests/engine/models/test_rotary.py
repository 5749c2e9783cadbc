"""Rotary positions: the frequencies of angles, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.modernbert.modeling_modernbert import ModernBertRotaryEmbedding

from embert.engine.encoders.positions import inverse_frequencies
from embert.engine.models.encoder_config import Rotary


@pytest.mark.parametrize("columns", [16, 24, 32, 64, 96, 128])
@pytest.mark.parametrize("theta", [1_000.0, 10_000.0, 80_000.0, 160_000.0])
def test_frequencies_are_those_of_transformers(columns: int, theta: float) -> None:
    rope: Any = {
        kind: {"rope_type": "default", "rope_theta": theta} for kind in ("full_attention", "sliding_attention")
    }
    config = transformers.ModernBertConfig(hidden_size=columns, num_attention_heads=1, rope_parameters=rope)
    made: tuple[torch.Tensor, float] = ModernBertRotaryEmbedding.compute_default_rope_parameters(
        config, layer_type="full_attention"
    )
    ours, theirs = inverse_frequencies(Rotary(theta, columns), 8192), made[0].numpy()
    np.testing.assert_array_max_ulp(ours, theirs, 2)
    assert np.count_nonzero(ours != theirs) <= len(theirs) // 16  # torch's power is not always the nearest float
