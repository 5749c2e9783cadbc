"""sentence-transformers' results for the page's texts, and comparisons with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

QUERY = "Why do cats purr?"
DOCUMENTS = ["A tax form has many pages.", "Cats purr when they are content.", "Kittens sleep all day."]
CLOSE = 1e-5  # of float32 numbers in 0 … 1, or of vectors of length 1


def scores(folder: Path, documents: Sequence[str] = DOCUMENTS) -> npt.NDArray[np.float32]:
    """CrossEncoder's, of QUERY with each document: float32 [n], in 0 … 1."""
    from sentence_transformers import CrossEncoder

    found: Any = CrossEncoder(str(folder), device="cpu").predict([(QUERY, each) for each in documents])
    return np.asarray(found, np.float32)


def assert_ranked(results: Iterable[tuple[int, float]], folder: Path, best: int = len(DOCUMENTS)) -> None:
    """(index, score) of the `best` documents, in order."""
    expected = scores(folder)
    assert np.diff(np.sort(expected)).min() > 100 * CLOSE, "the order must not rest on rounding"
    indices, found = zip(*results, strict=True)
    assert list(indices) == np.argsort(-expected)[:best].tolist()
    np.testing.assert_allclose(found, expected[list(indices)], atol=CLOSE)


def assert_embedded(vectors: Any, folder: Path, texts: Sequence[str]) -> None:
    """A vector a text, as SentenceTransformer's."""
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(str(folder), device="cpu").encode(list(texts))
    np.testing.assert_allclose(np.asarray(vectors, np.float32), expected, atol=CLOSE)
