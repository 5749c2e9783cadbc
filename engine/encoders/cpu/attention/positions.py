"""What attention needs to know of a layer's positions."""

from __future__ import annotations

from dataclasses import dataclass

from embert.engine.encoders.cpu.attention.distance_bias import DistanceBias
from embert.engine.encoders.cpu.attention.rotation import Rotation

__all__ = ["PLAIN", "Positions"]


@dataclass(frozen=True, slots=True)
class Positions:
    """How layers know positions, and how far they see."""

    rotation: Rotation | None = None
    bias: DistanceBias | None = None
    window: int | None = None  # as Attention.window


PLAIN = Positions()
