"""What balances the products of eight bits whose rows come out of a LayerNorm: QKV and the feed-forward part's first.

Dividing by a column's factor then costs nothing: the LayerNorm's weight and bias are divided when a model is loaded.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embert.engine.checkpoint import Checkpoint
from embert.engine.encoders.reference import normed_magnitudes
from embert.engine.encoders.self_test import spread_ids
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.quantization.balance import balance

__all__ = ["column_factors"]

Floats = npt.NDArray[np.float32]

# Tokens that the magnitudes of columns are taken from. Large columns are large in every token, so a few suffice.
TOKENS = 32
TOGETHER = {
    "attention.self.query": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "intermediate.dense": ("intermediate.dense",),
}


def column_factors(config: EncoderConfig, checkpoint: Checkpoint) -> dict[str, Floats]:
    """The factors of each such matrix's columns, by its name without ".weight": float32 [hidden]."""
    factors: dict[str, Floats] = {}
    found = normed_magnitudes(spread_ids(config, TOKENS), config, checkpoint)
    for name, magnitudes in found.items():
        layer, part = next((name.removesuffix(part), part) for part in TOGETHER if name.endswith(part))
        names = [f"{layer}{each}" for each in TOGETHER[part]]
        weight = np.concatenate([checkpoint.float32(f"{each}.weight") for each in names])
        factors |= dict.fromkeys(names, balance(magnitudes, weight))
    return factors
