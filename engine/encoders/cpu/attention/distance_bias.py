"""Biases by distance, those of relative positions and ALiBi, as matrices that torch adds to attention scores."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["DistanceBias"]

MATRIX_LENGTH = 528  # sequences of up to so many tokens share one matrix; memory grows with its square


class DistanceBias:
    """The bias of one model, the same in every layer."""

    def __init__(self, by_distance: npt.NDArray[np.float32], dtype: torch.dtype) -> None:
        """`by_distance` is [heads, 2 · longest - 1], as relative_positions.py of two folders above makes it."""
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
