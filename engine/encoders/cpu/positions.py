"""The positions of a layer, for attention: rotary tables, and biases by distance.

The angles and biases come from encoders/positions.py. Rotary positions rotate queries and keys. The biases of relative
positions and of ALiBi are added to attention scores.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embert.engine.encoders.positions import alibi_by_distance, bias_by_distance, rotations
from embert.engine.models.encoder_config import DynamicNtk, EncoderConfig, Rotary
from embert.engine.models.tensor_names import RELATIVE_ATTENTION_BIAS
from embert.engine.weights.checkpoint import Checkpoint

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions of a layer: rotation, bias, and window."""

    rotation: Rotation | None = None
    bias: Floats | None = None  # [heads, 2 · longest - 1], from encoders/positions.py
    window: int | None = None  # as Attention.window


class Rotation:
    """The cosines and sines of one kind of rotary positions, for sequences of up to `longest` tokens."""

    def __init__(self, rotary: Rotary, longest: int) -> None:
        self._common = longest  # up to this length all sequences have the same angles
        if isinstance(rotary.scaling, DynamicNtk):
            self._common = min(longest, rotary.scaling.trained)
        self._table = rotations(rotary, self._common)
        self._of_length = functools.lru_cache(maxsize=16)(functools.partial(rotations, rotary))

    def __call__(self, length: int) -> tuple[Floats, Floats]:
        """Cosines and sines: float32 [length, columns / 2] each."""
        if length > self._common:
            return self._of_length(length)
        cosines, sines = self._table
        return cosines[:length], sines[:length]


def positions_of_layers(config: EncoderConfig, checkpoint: Checkpoint) -> list[Positions]:
    """The positions of each layer. Layers with the same kind of attention share them."""
    bias: Floats | None = None
    if config.relative_buckets:
        bias = bias_by_distance(checkpoint.float32(RELATIVE_ATTENTION_BIAS), config.max_positions)
    elif config.alibi:
        bias = alibi_by_distance(config.heads, config.max_positions)
    kinds = [config.attention_of(layer) for layer in range(config.layers)]
    tables = {kind.rotary: Rotation(kind.rotary, config.max_positions) for kind in kinds if kind.rotary}
    positions = {
        kind: Positions(tables[kind.rotary] if kind.rotary else None, bias, kind.window)
        for kind in dict.fromkeys(kinds)
    }
    return [positions[kind] for kind in kinds]
