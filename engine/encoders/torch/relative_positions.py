"""The bias by distance of ../relative_positions.py, as a matrix that torch adds to attention scores."""

from __future__ import annotations

import torch

from embert.engine.encoders.relative_positions import bias_by_distance

__all__ = ["RelativePositions"]


class RelativePositions:
    """The bias of one model, the same in every layer."""

    def __init__(self, weight: torch.Tensor, longest: int, dtype: torch.dtype) -> None:
        """`weight` is [buckets, heads]. Sequences have at most `longest` tokens: memory grows with its square."""
        positions = torch.arange(longest)
        by_distance = torch.from_numpy(bias_by_distance(weight.float().numpy(), longest))
        bias = by_distance[:, positions - positions[:, None] + longest - 1]  # [heads, queries, keys]
        self._bias = {torch.float32: bias, dtype: bias.to(dtype)}

    def bias(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """[heads, length, length], of float32 or of the model's dtype: a view."""
        return self._bias[dtype][:, :length, :length]
