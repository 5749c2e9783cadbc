"""Accuracy of int8 against the default dtype: cosines, and nearest neighbors kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

NEIGHBORS = 10


@dataclass(frozen=True, slots=True)
class Int8Accuracy:
    """Agreement of two encoders of one model on the same texts. The best is 1."""

    dtype: str  # that of the encoder compared with
    texts: int
    measure: str  # "cosine", or "correlation" of labels
    worst: float
    median: float
    # A key of `embert info`: the share of each text's ten nearest neighbors that stay; None: there are no vectors.
    neighbors: float | None
    difference: float | None = None  # the largest of a score; None: there are no scores

    def __str__(self) -> str:
        summary = f"{self.measure} to {self.dtype} {self.worst:.4f} at worst, {self.median:.4f} in the median"
        if self.neighbors is not None:
            summary += f", {self.neighbors:.1%} of ten nearest neighbors kept"
        if self.difference is not None:
            summary += f", a score differs by {self.difference:.2g} at most"
        return f"{summary} ({self.texts} sentences)"


def accuracy_of_rows(
    rows: Floats, reference: Floats, texts: tuple[Floats, Floats] | None = None, *, dtype: str
) -> Int8Accuracy:
    """Compare rows [n, columns]. `texts` are vectors of texts that have several rows: [m, columns] each."""
    cosines = (_unit(rows) * _unit(reference)).sum(1)
    own_texts, reference_texts = texts or (rows, reference)
    neighbors = neighbor_recall(own_texts, reference_texts)
    return Int8Accuracy(dtype, len(own_texts), "cosine", float(cosines.min()), float(np.median(cosines)), neighbors)


def accuracy_of_labels(rows: Floats, reference: Floats, scores: tuple[Floats, Floats], *, dtype: str) -> Int8Accuracy:
    """Compare logits [n, labels] and their scores: the correlation of each label over the texts, worst and median."""
    own_columns, reference_columns = (_unit((matrix - matrix.mean(0)).T) for matrix in (rows, reference))
    correlations = (own_columns * reference_columns).sum(1)
    largest = float(np.abs(scores[0] - scores[1]).max())
    return Int8Accuracy(
        dtype, len(rows), "correlation", float(correlations.min()), float(np.median(correlations)), None, largest
    )


def neighbor_recall(rows: Floats, reference: Floats, count: int = NEIGHBORS) -> float:
    """The share of each vector's `count` nearest ones by cosine, without itself, that are the same: [n, columns]."""
    count = min(count, len(rows) - 1)
    if count < 1:
        return 1.0
    near = []
    for vectors in (rows, reference):
        cosines = _unit(vectors) @ _unit(vectors).T
        np.fill_diagonal(cosines, -np.inf)
        near.append(np.argpartition(-cosines, count - 1, axis=1)[:, :count])
    same = (near[0][:, :, None] == near[1][:, None, :]).any(2)
    return float(same.mean())


def _unit(rows: Floats) -> npt.NDArray[np.float64]:
    """Rows in float64, of length 1; rows of zeros stay so."""
    exact = rows.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=1, keepdims=True)
    return exact / np.where(lengths == 0, 1.0, lengths)
