"""MPNet's relative positions: what attention adds to every score, by the head and how far the key is from the query.

Distances share values in buckets, as in T5: each of the nearest has its own, farther ones by the logarithm.
"""

from __future__ import annotations

import math

import torch

__all__ = ["RelativePositions"]

FARTHEST = 128  # distances from here on share a bucket


class RelativePositions:
    """Of one model: the same in every layer."""

    def __init__(self, weight: torch.Tensor, longest: int, dtype: torch.dtype) -> None:
        """`weight` is [buckets, heads]; texts have at most `longest` tokens, for whose squares there is room here."""
        positions = torch.arange(longest)
        distances = torch.arange(1 - longest, longest)
        by_distance = weight.float()[_buckets(distances, len(weight))].T  # [heads, 2 · longest - 1]
        scores = by_distance[:, positions - positions[:, None] + longest - 1]  # [heads, queries, keys]
        self._scores = {torch.float32: scores, dtype: scores.to(dtype)}

    def of(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """[heads, length, length], of float32 or of the model's dtype: a view."""
        return self._scores[dtype][:, :length, :length]


def _buckets(distances: torch.Tensor, count: int) -> torch.Tensor:
    """Key minus query → bucket: the first half for keys before the query, the second for those after it."""
    half = count // 2
    near = half // 2  # distances with a bucket of their own
    far = distances.abs()
    # In float32, as the model was trained: the borders of buckets depend on it.
    steps = torch.log(far.clamp(min=1).float() / near) / math.log(FARTHEST / near) * (half - near)
    bucket = torch.where(far < near, far, (near + steps.long()).clamp(max=half - 1))
    return bucket + half * (distances > 0)
