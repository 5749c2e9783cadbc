"""Late interaction, in numpy: the tokens that have a vector, and the score of a query and a document (MaxSim)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embert.engine.batch import PackedBatch, TaskOutput, cumulative
from embert.engine.heads.description import MultiVector, Role
from embert.engine.heads.embedding import normalize_rows
from embert.engine.tasks import Task

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


def attended_tokens(batch: PackedBatch, token: int | None) -> npt.NDArray[np.int32] | None:
    """Return how many tokens of each sequence are attended to, the first ones: int32 [B], 1 … length; None: all are.

    ColBERT's query expansion puts mask tokens after a query. Unless a model attends to them, no token does, not even
    they themselves: see `Expansion` in heads/description.py.

    `token` is that of the expansion. A run of it at a sequence's end is not attended to if the sequence requests MULTI
    or the batch has queries. A sequence that consists of nothing else is attended to as a whole.
    """
    has_queries = batch.is_query is not None
    if token is None or not (has_queries or Task.MULTI in batch.wanted) or not batch.tokens:
        return None
    starts = batch.cu_seqlens[:-1]
    others = np.where(batch.ids != token, np.arange(batch.tokens, dtype=np.int32), -1)
    attended = np.maximum.reduceat(others, starts) + 1 - starts  # up to the last other token
    lengths = np.diff(batch.cu_seqlens)
    wants = np.full(batch.sequences, has_queries)
    wants[batch.sequences_of(Task.MULTI)] = True
    attended = np.where(wants & (attended > 0), attended, lengths).astype(np.int32)
    return None if (attended == lengths).all() else attended


def pool(vectors: Floats, role: Role) -> Floats:
    """Pools the vectors of one text, float32 [n, columns], if its role has a pooling.

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
    return normalize_rows(vectors) if pooling.normalize else vectors


def pool_texts(rows: TaskOutput, role: Role) -> TaskOutput:
    """Pools the vectors of several texts."""
    if role.pooling is None:
        return rows
    texts = [pool(rows.slice(text, text + 1).values, role) for text in range(rows.sequences)]
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


@dataclass(frozen=True, slots=True)
class Scoring:
    """The documents of a batch that are scored, and the vectors of each and of its query."""

    head: MultiVector
    # [n, 4]: the first index in `rows` and the number of the vectors of a document's query, then the first index and
    # the number of the document's vectors.
    spans: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]  # tokens of the batch that have a vector
    others: npt.NDArray[np.intp]  # sequences that request vectors

    @classmethod
    def of(cls, batch: PackedBatch, head: MultiVector | None) -> Scoring | None:
        """Return None for a batch without queries."""
        if batch.is_query is None or head is None:
            return None
        masks = [multi_vector_mask(batch.ids, batch.cu_seqlens, head, is_query=is_query) for is_query in (False, True)]
        mask = np.where(np.repeat(batch.is_query, np.diff(batch.cu_seqlens)), masks[True], masks[False])
        bounds, documents = cumulative(mask)[batch.cu_seqlens], batch.sequences_of(Task.CLASSIFY)
        queries = np.maximum.accumulate(np.where(batch.is_query, np.arange(batch.sequences), 0))[documents]
        columns = (bounds[queries], bounds[queries + 1], bounds[documents], bounds[documents + 1])
        spans = np.stack(columns, 1)
        spans[:, 1::2] -= spans[:, ::2]
        return cls(head, spans, np.flatnonzero(mask).astype(np.int32), batch.sequences_of(Task.MULTI))

    def finish(self, rows: dict[Task, TaskOutput]) -> dict[Task, TaskOutput]:
        """The rows of each task, with scores [n, 1] as those of CLASSIFY.

        `rows` has the parts of scores that a device has added up, or else the vectors of all tokens of the batch.
        """
        if Task.CLASSIFY in rows:
            scores = self._from_parts(rows[Task.CLASSIFY].values)
            return rows | {Task.CLASSIFY: TaskOutput.one_each(scores[:, None])}
        result = {Task.CLASSIFY: TaskOutput.one_each(self._from_vectors(rows[Task.MULTI].values)[:, None])}
        return result | ({Task.MULTI: rows[Task.MULTI].take(self.others)} if len(self.others) else {})

    def _from_parts(self, parts: Floats) -> Floats:
        """Scores [n] from sums over some vectors of a query each: [n, parts], added in their order."""
        scores: Floats = np.cumsum(parts, 1, dtype=np.float32)[:, -1]
        of_query, of_document = self.spans[:, 1], self.spans[:, 3]
        if self.head.mean_of_query:
            scores /= np.maximum(of_query, 1).astype(np.float32)
        return np.where(of_document == 0, np.float32(NO_VECTORS), scores)

    def _from_vectors(self, values: Floats) -> Floats:
        """Scores [n] from the vectors of all tokens: [T, columns]."""
        vectors = values[self.rows]

        @functools.lru_cache(1)  # documents of one query follow each other
        def query(first: int, count: int) -> Floats:
            return pool(vectors[first : first + count], self.head.query)

        scores = np.empty(len(self.spans), np.float32)
        for number, (of_query, query_count, first, count) in enumerate(self.spans.tolist()):
            document = pool(vectors[first : first + count], self.head.document)
            scores[number] = max_sim(query(of_query, query_count), document, self.head)
        return scores
