"""sentence-transformers' own numbers, over HTTP."""

from __future__ import annotations

import httpx
import numpy as np
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SparseEncoder
from torch.nn import Identity

from tests.clients.conftest import Fleet, Page
from tests.clients.oracles import DOCUMENTS, QUERY, scores


def test_scores(page: Page, fleet: Fleet) -> None:
    found = page("sentence-transformers")
    expected = scores(fleet.folder("reranker"), found["documents"])
    order = [each["index"] for each in found["scores"]]
    assert order == np.argsort(-expected).tolist()
    np.testing.assert_allclose([each["score"] for each in found["scores"]], expected[order], atol=1e-5)


def test_logits(fleet: Fleet) -> None:
    encoder = CrossEncoder(str(fleet.folder("reranker")), device="cpu")
    pairs = [[QUERY, each] for each in DOCUMENTS]
    expected = encoder.predict(pairs, activation_fn=Identity())
    body = {"inputs": pairs, "raw_scores": True}
    response = httpx.post(fleet.url("reranker") + "/predict", json=body, timeout=60).json()
    np.testing.assert_allclose([score["score"] for (score,) in response], expected, atol=1e-4)


def test_sparse_vectors(page: Page, fleet: Fleet) -> None:
    found = page("sentence-transformers")
    encoder = SparseEncoder(str(fleet.folder("splade")), device="cpu")
    for pairs, document in zip(found["sparse"], found["documents"], strict=True):
        row = encoder.encode([document], convert_to_sparse_tensor=False)[0].numpy()
        dense = np.zeros_like(row)
        dense[[each["index"] for each in pairs]] = [each["value"] for each in pairs]
        np.testing.assert_allclose(dense, row, atol=1e-4)


def test_multi_vectors(page: Page, fleet: Fleet) -> None:
    found = page("sentence-transformers")
    encoder = MultiVectorEncoder(str(fleet.folder("colbert")), device="cpu")
    query = np.asarray(encoder.encode_query([found["query"]])[0])
    documents = [np.asarray(encoder.encode_document([document])[0]) for document in found["documents"]]
    np.testing.assert_allclose(found["asked"], query, atol=1e-4)
    for ours, theirs in zip(found["found"], documents, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    expected = [(query @ document.T).max(1).sum() for document in documents]
    np.testing.assert_allclose(found["similarities"], expected, rtol=1e-4)
