"""Packed batches: sequences laid end to end, so there is no padding to describe.

ids         int32 [T]      all tokens of all sequences
cu_seqlens  int32 [B + 1]  prefix sums of the lengths: sequence i is ids[cu_seqlens[i]:cu_seqlens[i + 1]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["PackedBatch", "cumulative", "pack"]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """B sequences of T tokens in all, each 1 … max_input_length tokens; B may be 0."""

    ids: npt.NDArray[np.int32]  # [T]
    cu_seqlens: npt.NDArray[np.int32]  # [B + 1], starts at 0, strictly increasing, ends at T
    token_types: npt.NDArray[np.int32] | None = None  # [T]; None means all 0
    dimensions: npt.NDArray[np.int32] | None = None  # [B], 1 … width, 0 = all; cut before normalising
    normalize: npt.NDArray[np.bool_] | None = None  # [B]; None means all True

    @property
    def tokens(self) -> int:
        """T, the number of tokens."""
        return int(self.cu_seqlens[-1])

    @property
    def sequences(self) -> int:
        """B, the number of sequences."""
        return len(self.cu_seqlens) - 1


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

    `token_types` has the shapes of `sequences`. `dimensions` and `normalize` have one entry a sequence.
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
