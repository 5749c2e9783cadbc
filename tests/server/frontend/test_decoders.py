"""Decoders over HTTP compared with sentence-transformers: prompts, narrower vectors, Dense modules, chat templates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import CrossEncoder, SentenceTransformer

from tests.engine.test_decoders import CASES, PAIRS, TEXTS, embedder, reranker, with_dense_modules
from tests.server.live import Live, live

QUERY = "Instruct: Given a question, find passages\nQuery:"
NAMES = ("decoder", "embeddinggemma")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An embedder, and one with EmbeddingGemma's modules."""
    decoder, dense = (tmp_path_factory.mktemp(name) for name in NAMES)
    return {
        "decoder": embedder(decoder, *CASES[0], query=QUERY),
        "embeddinggemma": with_dense_modules(dense, query=QUERY),
    }


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[CrossEncoder, Path]:
    """Qwen3-Reranker's kind, and its folder."""
    folder = tmp_path_factory.mktemp("reranker")
    return reranker(folder, "qwen3", false_token=True, prompt=None), folder / "saved"


@pytest.fixture(scope="module")
def served(folders: dict[str, Path], oracle: tuple[CrossEncoder, Path]) -> Iterator[Live]:
    """One server of them all."""
    models = [f"{name}={folder}" for name, folder in [*folders.items(), ("reranker", oracle[1])]]
    with live(*models, "--device", "cpu") as server:
        yield server


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_with_prompts_and_narrower_vectors(served: Live, folders: dict[str, Path], name: str) -> None:
    reference: Any = SentenceTransformer(str(folders[name]), device="cpu")
    for prompt in ({}, {"prompt_name": "query"}):
        response = served.post("/v1/embeddings", {"model": name, "input": TEXTS, **prompt}).json()["data"]
        expected = np.concatenate([reference.encode([text], **prompt) for text in TEXTS])
        np.testing.assert_allclose([each["embedding"] for each in response], expected, atol=2e-5)
    response = served.post("/v1/embeddings", {"model": name, "input": TEXTS, "dimensions": 16}).json()["data"]
    narrow = np.concatenate([reference.encode([text], truncate_dim=16) for text in TEXTS])
    narrow /= np.linalg.norm(narrow, axis=1, keepdims=True)
    np.testing.assert_allclose([each["embedding"] for each in response], narrow, atol=5e-5)


def test_scores_of_a_reranker_with_a_chat_template(served: Live, oracle: tuple[CrossEncoder, Path]) -> None:
    query, documents = PAIRS[0][0], [document for _, document in PAIRS if document]
    response = served.post("/rerank", {"model": "reranker", "query": query, "texts": documents}).json()
    expected = np.concatenate([oracle[0].predict([(query, document)]) for document in documents])
    scores = {each["index"]: each["score"] for each in response}
    np.testing.assert_allclose([scores[index] for index in range(len(documents))], expected, atol=2e-5)
