"""Rotary positions: the angles by which queries and keys are turned.

Columns c and c + n/2 of the n turned columns of a head are a pair. At position p pair c is turned by p · θ^(-2c/n). The
formulas and their float32 steps are those of transformers (`modeling_rope_utils.py`); scaling by `Ntk` is that of the
remote code that GTE's checkpoints name: Alibaba-NLP/new-impl, `NTKScalingRotaryEmbedding`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embert.engine.models.encoder_config import DynamicNtk, Ntk, Rotary

__all__ = ["inverse_frequencies", "rotations"]

Floats = npt.NDArray[np.float32]


def inverse_frequencies(rotary: Rotary, length: int) -> Floats:
    """The angle of each pair for one position further, in a text of `length` tokens: float32 [columns / 2]."""
    columns, theta, divisor = rotary.columns, rotary.theta, np.float32(1)
    match rotary.scaling:
        case Ntk(factor):
            theta, divisor = theta * factor, np.float32(factor ** (2 / columns))
        case DynamicNtk(factor, trained) if length > trained:
            theta *= (factor * length / trained - (factor - 1)) ** (columns / (columns - 2))
    # Every step is rounded to float32, as transformers' are: at the end of a long text one bit of a frequency is an
    # angle of 5e-4. The power itself is computed in float64, because numpy's float32 one differs between CPUs.
    exponents = np.arange(0, columns, 2, dtype=np.float32) / np.float32(columns)
    powers = (theta ** exponents.astype(np.float64)).astype(np.float32)
    return np.float32(1) / powers / divisor


def rotations(rotary: Rotary, length: int) -> tuple[Floats, Floats]:
    """Cosines and sines of the angles at each position of a text of `length` tokens: float32 [length, columns / 2]."""
    # The angles are rounded to float32, as where models were trained.
    angles = np.arange(length, dtype=np.float32)[:, None] * inverse_frequencies(rotary, length)
    exact = angles.astype(np.float64)
    return np.cos(exact).astype(np.float32), np.sin(exact).astype(np.float32)
