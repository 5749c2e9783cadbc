"""Sparse vectors of weights of tokens, as bge-m3 makes them: the largest weight of each token id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from embert.engine.task_output import TaskOutput

__all__ = ["token_weight_rows"]


def token_weight_rows(
    ids: npt.NDArray[np.integer],
    cu_seqlens: npt.NDArray[np.integer],
    weights: npt.NDArray[np.float32],
    special_ids: Sequence[int],
) -> TaskOutput:
    """The (id, weight) pairs of sequences, ids ascending: SPARSE's rows.

    `ids` are int [T], `weights` float32 [T] after relu, `cu_seqlens` int [B + 1] the prefix sums of the sequences'
    lengths. Tokens of weight 0 and special tokens have no pair; a weight that is not a number is kept, to be seen.
    """
    sequences = len(cu_seqlens) - 1
    (positions,) = np.nonzero((weights != 0) & ~np.isin(ids, special_ids))
    # One key a pair of sequence and id, so that equal ones of a sequence are neighbors once sorted.
    span = int(ids.max(initial=0)) + 1
    keys = np.repeat(np.arange(sequences, dtype=np.int64), np.diff(cu_seqlens))[positions] * span + ids[positions]
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], weights[positions][order]
    first = np.flatnonzero(np.diff(keys, prepend=-1))  # of each run of equal keys
    largest = np.maximum.reduceat(values, first) if len(first) else values
    owners, indices = np.divmod(keys[first], span)
    offsets = np.searchsorted(owners, np.arange(sequences + 1)).astype(np.int32)
    return TaskOutput(largest.reshape(-1, 1), offsets, indices.astype(np.int32))
