"""Rotary positions in torch: the tables of rotary.py two folders above, and queries and keys turned by them."""

from __future__ import annotations

import functools

import torch

from embert.engine.encoders.rotary import rotations
from embert.engine.models.encoder_config import DynamicNtk, Rotary

__all__ = ["Rotation", "rotate"]

Table = tuple[torch.Tensor, torch.Tensor]


class Rotation:
    """The cosines and sines of one kind of rotary positions, for sequences of up to `longest` tokens."""

    def __init__(self, rotary: Rotary, longest: int) -> None:
        self._rotary = rotary
        self._common = longest  # up to this length all sequences have the same angles
        if isinstance(rotary.scaling, DynamicNtk):
            self._common = min(longest, rotary.scaling.trained)
        self._table = self._made(self._common)
        self._of_length = functools.lru_cache(maxsize=16)(self._made)

    def __call__(self, length: int) -> Table:
        """Cosines and sines: float32 [length, columns / 2] each."""
        if length > self._common:
            return self._of_length(length)
        cosines, sines = self._table
        return cosines[:length], sines[:length]

    def _made(self, length: int) -> Table:
        cosines, sines = rotations(self._rotary, length)
        return torch.from_numpy(cosines), torch.from_numpy(sines)


def rotate(to: torch.Tensor, given: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Turn `given` [..., L, size] into `to`. Columns past those of the tables' pairs are copied."""
    half = cosines.shape[1]
    low, high = given[..., :half].float(), given[..., half : 2 * half].float()
    to[..., :half] = torch.addcmul(low * cosines, high, sines, value=-1)
    to[..., half : 2 * half] = torch.addcmul(high * cosines, low, sines)
    if 2 * half < given.shape[-1]:
        to[..., 2 * half :] = given[..., 2 * half :]
