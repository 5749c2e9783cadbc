"""Late interaction, in numpy: the tokens that have a vector, and the score of a query and a document (MaxSim)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embert.engine.batch import TaskOutput, cumulative
from embert.engine.heads.description import MultiVector, Role
from embert.engine.heads.embedding import normalized

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.integer]

NO_VECTORS = -1e9  # score of a document without vectors, below all others: sentence-transformers' value


def multi_vector_mask(ids: Ints, cu_seqlens: Ints, head: MultiVector, *, is_query: bool) -> npt.NDArray[np.bool_]:
    """Mask of the tokens whose row is a vector of their query or document: bool [T].

    `ids` are int32 [T], the tokens of sequences whose lengths have the prefix sums `cu_seqlens`, int32 [B + 1].
    """
    role = head.role(is_query)
    mask = ~np.isin(ids, role.skipped) if role.skipped else np.ones(len(ids), np.bool_)
    if role.only:
        mask &= np.isin(ids, role.only)
    if head.skips_first:
        mask[cu_seqlens[:-1]] = False
    return mask


def pooled(vectors: Floats, role: Role) -> Floats:
    """The vectors of one text, float32 [n, columns], after the pooling of its role, if that has one.

    Ward's clusters of 1 - cosine, in the order that scipy gives them.
    """
    pooling = role.pooling
    if pooling is None:
        return vectors
    free = vectors[pooling.protected :]
    clusters = max(int(len(free) // pooling.factor), 1)
    if clusters < len(free) and np.isfinite(free).all():
        from scipy.cluster import hierarchy  # an extra, of which few models have need

        distances = np.clip(np.float32(1) - free @ free.T, 0, 2)[np.triu_indices(len(free), 1)]
        labels = hierarchy.fcluster(hierarchy.linkage(distances, method="ward"), clusters, "maxclust")
        _, numbers, counts = np.unique(labels, return_inverse=True, return_counts=True)
        sums = np.zeros((len(counts), free.shape[1]), np.float32)
        np.add.at(sums, numbers, free)
        vectors = np.concatenate([vectors[: pooling.protected], sums / counts[:, None].astype(np.float32)])
    return normalized(vectors) if pooling.normalize else vectors


def pooled_texts(rows: TaskOutput, role: Role) -> TaskOutput:
    """The same for the vectors of several texts."""
    if role.pooling is None:
        return rows
    texts = [pooled(rows.slice(text, text + 1).values, role) for text in range(rows.sequences)]
    values = np.concatenate(texts) if texts else rows.values
    return TaskOutput(values, cumulative(np.array([len(text) for text in texts], np.int32)))


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
