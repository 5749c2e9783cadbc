"""Multi-vectors: which of the encoder's token rows are vectors of a text."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embert.engine.heads.description import MultiVector

__all__ = ["kept_rows"]

Ints = npt.NDArray[np.int32]


def kept_rows(ids: Ints, cu_seqlens: Ints, head: MultiVector, *, is_query: bool) -> npt.NDArray[np.bool_]:
    """Whether each token's row is a vector of its query or document: bool [T].

    `ids` are int32 [T], the tokens of sequences whose lengths have the prefix sums `cu_seqlens`, int32 [B + 1].
    """
    skipped = head.role(is_query).skipped
    mask = ~np.isin(ids, skipped) if skipped else np.ones(len(ids), np.bool_)
    if head.skips_first:
        mask[cu_seqlens[:-1]] = False
    return mask
