"""Sparse vectors of token weights: each token id that a sequence has, with the largest of its tokens' weights."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from embert.engine.rows import Rows

__all__ = ["token_pairs"]


def token_pairs(
    weights: npt.NDArray[np.float32],
    ids: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int32],
    left_out: Collection[int],
) -> Rows:
    """Weights [T] and ids [T] of tokens, offsets [n + 1] of their sequences → pairs; without those `left_out`.

    A weight of 0 makes no pair. A NaN stays one.
    """
    sequences = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    kept = ~(weights <= 0) & ~np.isin(ids, list(left_out))
    sequences, ids, weights = sequences[kept], ids[kept], weights[kept]
    order = np.lexsort((ids, sequences))
    sequences, ids, weights = sequences[order], ids[order], weights[order]
    is_first = np.ones(len(ids), np.bool_)
    is_first[1:] = (np.diff(ids) != 0) | (np.diff(sequences) != 0)
    (first,) = np.nonzero(is_first)
    values = np.maximum.reduceat(weights, first) if len(first) else weights[:0]
    counts = np.bincount(sequences[first], minlength=len(offsets) - 1)
    bounds = np.zeros(len(offsets), np.int32)
    np.cumsum(counts, out=bounds[1:])
    return Rows(values.reshape(-1, 1), bounds, ids[first].astype(np.int32, copy=False))
