"""sentence-transformers' own numbers, over HTTP."""

from __future__ import annotations

import httpx
import numpy as np
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SparseEncoder

from tests.clients.conftest import Fleet, Page
from tests.clients.oracles import DOCUMENTS, QUERY, scores


def test_the_page(page: Page, fleet: Fleet) -> None:
    found = page("sentence-transformers")
    documents = found["documents"]

    expected = scores(fleet.folder("reranker"), documents)
    order = [each["index"] for each in found["scores"]]
    assert order == np.argsort(-expected).tolist()
    np.testing.assert_allclose([each["score"] for each in found["scores"]], expected[order], atol=1e-5)

    rows = SparseEncoder(str(fleet.folder("splade")), device="cpu").encode(documents, convert_to_sparse_tensor=False)
    for pairs, row in zip(found["sparse"], rows.numpy(), strict=True):
        dense = np.zeros_like(row)
        dense[[each["index"] for each in pairs]] = [each["value"] for each in pairs]
        np.testing.assert_allclose(dense, row, atol=1e-4)

    encoder = MultiVectorEncoder(str(fleet.folder("colbert")), device="cpu")
    asked, answers = encoder.encode_query([found["query"]])[0], encoder.encode_document(documents)
    np.testing.assert_allclose(found["asked"], asked, atol=1e-4)
    for ours, theirs in zip(found["found"], answers, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    wanted = [float((asked @ theirs.T).max(1).sum()) for theirs in answers]
    np.testing.assert_allclose(found["similarities"], wanted, rtol=1e-4)


def test_logits(fleet: Fleet) -> None:
    encoder = CrossEncoder(str(fleet.folder("reranker")), device="cpu")
    pairs = [[QUERY, each] for each in DOCUMENTS]
    from torch.nn import Identity

    wanted = encoder.predict(pairs, activation_fn=Identity())
    answer = httpx.post(fleet.url("reranker") + "/predict", json={"inputs": pairs, "raw_scores": True}).json()
    np.testing.assert_allclose([score["score"] for (score,) in answer], wanted, atol=1e-4)
