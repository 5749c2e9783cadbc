"""llama-index: its embedding and its reranker for text-embeddings-inference."""

from __future__ import annotations

from tests.clients.conftest import Fleet, Page
from tests.clients.oracles import DOCUMENTS, assert_embedded, assert_ranked


def test_the_page(page: Page, fleet: Fleet) -> None:
    found = page("llama-index")
    assert_embedded(found["vectors"], fleet.folder("minilm"), ["a cat", "a kitten"])
    query = found["embedding"].get_query_embedding("a cat")
    assert_embedded([query], fleet.folder("minilm"), ["a cat"])
    ranked = [(DOCUMENTS.index(each.node.text), each.score) for each in found["ranked"]]
    assert_ranked(ranked, fleet.folder("reranker"), 2)
