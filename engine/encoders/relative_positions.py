"""A bias on every attention score, by the head and by how far the key is from the query.

Relative positions learn it. Distances share biases in buckets, as in T5 and MPNet: each of the nearest distances has a
bucket of its own, farther ones share buckets by their logarithm. The formula is
`MPNetEncoder.relative_position_bucket` of transformers.

ALiBi (Press et al., 2022) fixes it: scores fall with the distance, in each head by a slope of its own.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["alibi_by_distance", "bias_by_distance", "buckets"]

FARTHEST = 128  # distances from here on share a bucket


def bias_by_distance(weight: npt.NDArray[np.float32], longest: int) -> npt.NDArray[np.float32]:
    """[buckets, heads] → [heads, 2 · longest - 1]: column c holds the bias of distance c - (longest - 1).

    A distance is the key's position minus the query's.
    """
    distances = np.arange(1 - longest, longest)
    return np.ascontiguousarray(weight[buckets(distances, len(weight))].T)


def alibi_by_distance(heads: int, longest: int) -> npt.NDArray[np.float32]:
    """As `bias_by_distance`: [heads, 2 · longest - 1]. A distance counts alike before and after the query."""
    distances = np.abs(np.arange(1 - longest, longest, dtype=np.float64))
    return (-_slopes(heads)[:, None] * distances).astype(np.float32)


def _slopes(heads: int) -> npt.NDArray[np.float64]:
    """2^(-8/n), 2^(-16/n), … for n heads, a power of two. Of other numbers the paper's code takes the rest from 2n."""
    power = 1 << heads.bit_length() - 1
    first = 2.0 ** (-8 / power * np.arange(1, power + 1))
    more = 2.0 ** (-4 / power * np.arange(1, 2 * power + 1, 2))
    slopes: npt.NDArray[np.float64] = np.concatenate([first, more[: heads - power]])
    return slopes


def buckets(distances: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Distance → bucket of `count`: the first half for keys before the query, the second half for keys after it."""
    half = count // 2
    near = half // 2  # distances with a bucket of their own
    far = np.abs(distances)
    # The model was trained with float32 logarithms, and the borders of buckets depend on their rounding. numpy's own
    # float32 logarithm differs between CPUs; its float64 one, rounded to float32, does not.
    logarithms = np.log(np.maximum(far, 1) / near).astype(np.float32)
    steps = logarithms / np.float32(math.log(FARTHEST / near)) * np.float32(half - near)
    bucket: npt.NDArray[np.int64] = np.where(far < near, far, np.minimum(near + steps.astype(np.int64), half - 1))
    bucket[distances > 0] += half
    return bucket
