"""Reranking and scoring by late interaction: MaxSim of the vectors that `/embed_all` returns."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.server.live import Live
from tests.server.refusals import check_refused

QUERIES = ["a cat", "the dog, the", "who"]
# Over several batches of 64 tokens. The last is cut.
DOCUMENTS = [*("one cat and " + " ".join("abc"[: n % 4]) + " a" * n for n in range(9)), "the cat", "dog, " * 40]


def vectors(live: Live, text: str, role: str) -> Any:
    return np.array(live.post("/embed_all", {"inputs": text, "input_type": role}).json()[0], np.float32)


@pytest.fixture(scope="module")
def scores(late_interaction: Live) -> dict[tuple[str, str], float]:
    queries = {text: vectors(late_interaction, text, "query") for text in QUERIES}
    documents = {text: vectors(late_interaction, text, "document") for text in DOCUMENTS}
    pairs = itertools.product(queries.items(), documents.items())
    return {(one, other): float((query @ document.T).max(1).sum()) for (one, query), (other, document) in pairs}


@pytest.mark.parametrize(
    ("path", "rows", "name", "body"),
    [
        ("/rerank", "", "score", {"texts": DOCUMENTS}),
        ("/rerank", "results", "relevance_score", {"documents": DOCUMENTS}),
        ("/v1/rerank", "results", "relevance_score", {"documents": DOCUMENTS, "use_activation": True}),
        ("/v2/rerank", "results", "relevance_score", {"documents": DOCUMENTS}),
        ("/v1/ranking", "rankings", "logit", {"passages": [{"text": text} for text in DOCUMENTS]}),
    ],
)
def test_documents_by_their_scores(
    late_interaction: Live, scores: dict[tuple[str, str], float], path: str, rows: str, name: str, body: dict[str, Any]
) -> None:
    expected = np.array([scores[QUERIES[0], document] for document in DOCUMENTS])
    query = {"text": QUERIES[0]} if path == "/v1/ranking" else QUERIES[0]
    for top in (None, 3):
        response = late_interaction.post(path, {"query": query, **body, **({"top_n": top} if top else {})})
        found = response.json()[rows] if rows else response.json()
        assert [row["index"] for row in found] == np.argsort(-expected, kind="stable")[:top].tolist()
        np.testing.assert_allclose([row[name] for row in found], np.sort(expected)[::-1][:top], rtol=1e-5)
        assert response.headers["x-truncated-texts"] == "1"


def test_pair_by_pair(late_interaction: Live, scores: dict[tuple[str, str], float]) -> None:
    for queries in (QUERIES[:1], [QUERIES[n % 3] for n in range(len(DOCUMENTS))]):
        response = late_interaction.post("/score", {"queries": queries, "documents": DOCUMENTS}).json()
        expected = [
            scores[query, document] for query, document in zip(itertools.cycle(queries), DOCUMENTS, strict=False)
        ]
        np.testing.assert_allclose([row["score"] for row in response["data"]], expected, rtol=1e-5)
        alone = late_interaction.post("/score", {"queries": queries[0], "documents": DOCUMENTS[0]}).json()
        assert alone["data"][0] == response["data"][0]
        tokens = late_interaction.post("/score", {"queries": queries[:1] * 2, "documents": ["a", "a"]}).json()["usage"]
        assert tokens["prompt_tokens"] == 2 * (8 + 4)  # an expanded query, and [CLS] [unused1] a [SEP]


def test_limits_and_refusals(late_interaction: Live) -> None:
    body = {"query": "a", "texts": ["a", "b c"], "max_tokens_per_doc": 4, "max_tokens_per_query": 6}
    assert len(late_interaction.post("/rerank", body).json()) == 2
    low = {**body, "max_tokens_per_doc": 1}
    check_refused(late_interaction.post("/rerank", low), 422, ("max_tokens_per_doc", "at least 3", "1"))
    check_refused(late_interaction.post("/rerank", {"query": "a", "texts": []}), 400, ("texts", "empty"))
    check_refused(late_interaction.post("/predict", {"inputs": "a"}), 424, ("classify", "multi_vector, rerank"))
