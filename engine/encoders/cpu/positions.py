"""Positions in torch, for attention: rotary tables, and biases by distance.

The angles and biases come from encoders/positions.py. Rotary positions rotate queries and keys. The biases of relative
positions and of ALiBi become matrices that torch adds to attention scores.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from embert.engine.encoders.positions import rotations
from embert.engine.models.encoder_config import DynamicNtk, Rotary


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions of a layer: rotation, bias, and window."""

    rotation: Rotation | None = None
    bias: DistanceBias | None = None
    window: int | None = None  # as Attention.window


PLAIN = Positions()


Table = tuple[torch.Tensor, torch.Tensor]


class Rotation:
    """The cosines and sines of one kind of rotary positions, for sequences of up to `longest` tokens."""

    def __init__(self, rotary: Rotary, longest: int) -> None:
        self._rotary = rotary
        self._common = longest  # up to this length all sequences have the same angles
        if isinstance(rotary.scaling, DynamicNtk):
            self._common = min(longest, rotary.scaling.trained)
        self._table = self._make(self._common)
        self._of_length = functools.lru_cache(maxsize=16)(self._make)

    def __call__(self, length: int) -> Table:
        """Cosines and sines: float32 [length, columns / 2] each."""
        if length > self._common:
            return self._of_length(length)
        cosines, sines = self._table
        return cosines[:length], sines[:length]

    def _make(self, length: int) -> Table:
        cosines, sines = rotations(self._rotary, length)
        return torch.from_numpy(cosines), torch.from_numpy(sines)


def rotate(output: torch.Tensor, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Rotate `x` [..., L, size] into `output`. Columns past those of the tables' pairs are copied."""
    half = cosines.shape[1]
    low, high = x[..., :half].float(), x[..., half : 2 * half].float()
    output[..., :half] = torch.addcmul(low * cosines, high, sines, value=-1)
    output[..., half : 2 * half] = torch.addcmul(high * cosines, low, sines)
    if 2 * half < x.shape[-1]:
        output[..., 2 * half :] = x[..., 2 * half :]


MATRIX_LENGTH = 528  # sequences of at most this length share one matrix; memory grows with its square


class DistanceBias:
    """The bias of one model, the same in every layer."""

    def __init__(self, by_distance: npt.NDArray[np.float32], dtype: torch.dtype) -> None:
        """`by_distance` is [heads, 2 · longest - 1], from encoders/positions.py."""
        self.by_distance = torch.from_numpy(by_distance).contiguous()
        self.longest = (by_distance.shape[1] + 1) // 2
        length = min(self.longest, MATRIX_LENGTH)
        bias = self.rows(slice(0, length), length, torch.float32)
        self._bias = {torch.float32: bias, dtype: bias.to(dtype)}
        self._square = length

    def square(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """[heads, length, length], of float32 or of the model's dtype; mostly a view."""
        if length > self._square:
            return self.rows(slice(0, length), length, dtype)
        return self._bias[dtype][:, :length, :length]

    def rows(self, queries: slice, length: int, dtype: torch.dtype) -> torch.Tensor:
        """[heads, queries, length]."""
        keys = torch.arange(length)
        distances = keys - keys[queries, None]
        return self.by_distance[:, distances + (self.longest - 1)].to(dtype)
