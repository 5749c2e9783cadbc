"""How many tokens of a sequence are attended to, in models that expand queries with unattended tokens.

ColBERT's query expansion puts mask tokens after a query. Unless a model attends to them, no row has their keys, not
even their own: see `Expansion` in ../heads/description.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embert.engine.batch import PackedBatch
from embert.engine.tasks import Task

__all__ = ["attended_tokens"]


def attended_tokens(batch: PackedBatch, token: int | None) -> npt.NDArray[np.int32] | None:
    """The number of each sequence's first tokens whose keys rows have: int32 [B], 1 … length; None: all of all.

    Of sequences that want MULTI the run of `token` at the end does not count, of the others it does. A sequence of
    nothing else has all its keys.
    """
    if token is None or Task.MULTI not in batch.wanted or not batch.tokens:
        return None
    starts = batch.cu_seqlens[:-1]
    others = np.where(batch.ids != token, np.arange(batch.tokens, dtype=np.int32), -1)
    attended = np.maximum.reduceat(others, starts) + 1 - starts  # up to the last other token
    lengths = np.diff(batch.cu_seqlens)
    wants = np.zeros(batch.sequences, np.bool_)
    wants[batch.sequences_of(Task.MULTI)] = True
    attended = np.where(wants & (attended > 0), attended, lengths).astype(np.int32)
    return None if (attended == lengths).all() else attended
