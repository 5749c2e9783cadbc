"""MPNet's relative positions: what attention adds to every score, by the head and how far the key is from the query.

Distances share values in buckets, as in T5: each of the nearest has its own, farther ones by the logarithm.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["scores_by_distance"]

FARTHEST = 128  # distances from here on share a bucket


def scores_by_distance(weight: npt.NDArray[np.float32], longest: int) -> npt.NDArray[np.float32]:
    """[buckets, heads] → [heads, 2 · longest - 1]: key minus query is `longest - 1` less than the column."""
    distances = np.arange(1 - longest, longest)
    return np.ascontiguousarray(weight[buckets(distances, len(weight))].T)


def buckets(distances: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Key minus query → bucket: the first half for keys before the query, the second for those after it."""
    half = count // 2
    near = half // 2  # distances with a bucket of their own
    far = np.abs(distances)
    # In float32, as the model was trained: the borders of buckets depend on it. The logarithm itself by way of float64,
    # because numpy's in float32 is not the same on every CPU.
    logarithms = np.log(np.maximum(far, 1) / near).astype(np.float32)
    steps = logarithms / np.float32(math.log(FARTHEST / near)) * np.float32(half - near)
    bucket: npt.NDArray[np.int64] = np.where(far < near, far, np.minimum(near + steps.astype(np.int64), half - 1))
    bucket[distances > 0] += half
    return bucket
