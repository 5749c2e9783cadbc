"""Late interaction, in numpy: the tokens that have a vector, and the score of a query and a document (MaxSim)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embert.engine.heads.description import MultiVector

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.integer]

NO_VECTORS = -1e9  # score of a document without vectors, below all others: sentence-transformers' value


def multi_vector_mask(ids: Ints, cu_seqlens: Ints, head: MultiVector, *, is_query: bool) -> npt.NDArray[np.bool_]:
    """Mask of the tokens whose row is a vector of their query or document: bool [T].

    `ids` are int32 [T], the tokens of sequences whose lengths have the prefix sums `cu_seqlens`, int32 [B + 1].
    """
    skipped = head.role(is_query).skipped
    mask = ~np.isin(ids, skipped) if skipped else np.ones(len(ids), np.bool_)
    if head.skips_first:
        mask[cu_seqlens[:-1]] = False
    return mask


def max_sim(query: Floats, document: Floats, head: MultiVector) -> float:
    """The sum, or the mean, over the query's vectors of their largest product with one of the document's.

    One pair at a time: products of other shapes may add their terms in another order, and scores are batch-invariant.
    """
    if not len(document):
        return NO_VECTORS
    if not len(query):
        return 0.0
    largest = (query @ document.T).max(1)
    return float(largest.mean() if head.mean_of_query else largest.sum())
