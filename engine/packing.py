"""Laying sequences end to end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from embert.engine.encoders.base import PackedBatch

__all__ = ["cumulative", "pack"]


def cumulative(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Prefix sums with a leading 0: int32 [B] → int32 [B + 1]."""
    cu_seqlens = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    return cu_seqlens


def pack(
    sequences: Sequence[npt.NDArray[np.int32]],
    *,
    token_types: Sequence[npt.NDArray[np.int32]] | None = None,
    dimensions: npt.NDArray[np.int32] | None = None,
    normalize: npt.NDArray[np.bool_] | None = None,
) -> PackedBatch:
    """One batch of sequences of token ids, each int32 [L], in the order given.

    `token_types` has the shapes of `sequences`; `dimensions` and `normalize` have one entry a sequence.
    """
    lengths = np.fromiter(map(len, sequences), np.int32, len(sequences))
    return PackedBatch(
        ids=_joined(sequences),
        cu_seqlens=cumulative(lengths),
        token_types=None if token_types is None else _joined(token_types),
        dimensions=dimensions,
        normalize=normalize,
    )


def _joined(arrays: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    return np.concatenate(arrays).astype(np.int32, copy=False) if arrays else np.zeros(0, np.int32)
