"""Heads on the rows of a sequence's tokens, in numpy: pooled rows and sparse vectors.

Encoders compute the pooling modes of POOLINGS themselves; `pool_rows` computes the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from embert.engine.batch import TaskOutput
from embert.engine.heads.pooling import modes_of

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.integer]


def pool_rows(hidden: Floats, offsets: Ints, pooling: str, prompt_tokens: Ints | None = None) -> Floats:
    """float32 [T, hidden] → float32 [n, hidden · modes], by `Model.pooling`.

    Sequence i has the rows offsets[i] … offsets[i + 1] - 1, at least one; its first prompt_tokens[i] rows are not
    pooled. A sequence's row does not depend on the others.
    """
    starts, lengths = offsets[:-1].astype(np.int64), np.diff(offsets).astype(np.int64)
    if not len(lengths):
        return np.empty((0, hidden.shape[1] * len(modes_of(pooling))), np.float32)
    positions = np.arange(len(hidden)) - np.repeat(starts, lengths)
    skipped = np.zeros(len(lengths), np.int64) if prompt_tokens is None else np.minimum(prompt_tokens, lengths)
    mask = positions >= np.repeat(skipped, lengths)
    empty = skipped == lengths
    masked = hidden if prompt_tokens is None else hidden * mask[:, None]

    def sums(weights: npt.NDArray[np.float32]) -> Floats:
        total: Floats = np.add.reduceat(masked * weights[:, None], starts)
        return total

    def first() -> Floats:
        # Of a sequence without other tokens sentence-transformers takes the first one.
        return hidden[starts + np.where(empty, 0, skipped)]

    def last() -> Floats:
        rows = hidden[offsets[1:] - 1]
        rows[empty] = 0
        return rows

    def largest() -> Floats:
        maxima: Floats = np.maximum.reduceat(np.where(mask[:, None], hidden, np.float32(-np.inf)), starts)
        return maxima

    counts = np.maximum(lengths - skipped, 1)[:, None].astype(np.float32)
    roots: Floats = np.sqrt(counts)

    def weighted_mean() -> Floats:
        # Weights count from the first token, also where a prompt's tokens are not pooled.
        weights = (positions + 1).astype(np.float32)
        weight_sums = np.add.reduceat(np.where(mask, weights, np.float32(0)), starts)
        shares: Floats = weights / np.repeat(np.maximum(weight_sums, np.float32(1)), lengths)
        return sums(shares)

    ones = np.ones(len(hidden), np.float32)
    modes: dict[str, Callable[[], Floats]] = {
        "cls": first,
        "max": largest,
        "mean": lambda: sums(ones) / counts,
        "mean_sqrt_len_tokens": lambda: sums(ones) / roots,
        "weightedmean": weighted_mean,
        "last-token": last,
    }
    rows = [modes[mode]() for mode in modes_of(pooling)]
    return np.concatenate(rows, axis=1).astype(np.float32, copy=False)


def token_weight_rows(
    ids: npt.NDArray[np.integer],
    cu_seqlens: npt.NDArray[np.integer],
    weights: npt.NDArray[np.float32],
    special_ids: Sequence[int],
) -> TaskOutput:
    """The (id, weight) pairs of sequences, ids ascending, as bge-m3 makes them: the largest weight of each id.

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
