"""Relative positions (relative_positions.py) as torch adds them to scores."""

from __future__ import annotations

import torch

from embert.engine.encoders.relative_positions import scores_by_distance

__all__ = ["RelativePositions"]


class RelativePositions:
    """Of one model: the same in every layer."""

    def __init__(self, weight: torch.Tensor, longest: int, dtype: torch.dtype) -> None:
        """`weight` is [buckets, heads]; texts have at most `longest` tokens, for whose squares there is room here."""
        positions = torch.arange(longest)
        by_distance = torch.from_numpy(scores_by_distance(weight.float().numpy(), longest))
        scores = by_distance[:, positions - positions[:, None] + longest - 1]  # [heads, queries, keys]
        self._scores = {torch.float32: scores, dtype: scores.to(dtype)}

    def of(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """[heads, length, length], of float32 or of the model's dtype: a view."""
        return self._scores[dtype][:, :length, :length]
