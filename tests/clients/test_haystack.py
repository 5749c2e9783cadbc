"""haystack: its ranker and its embedders for text-embeddings-inference."""

from __future__ import annotations

import pytest
from haystack import Document
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker, TruncationDirection

from tests.clients.conftest import Fleet, Page
from tests.clients.oracles import DOCUMENTS, QUERY, assert_embedded, assert_ranked


def test_the_page(page: Page, fleet: Fleet) -> None:
    found = page("haystack")
    ranked = [(DOCUMENTS.index(each.content), each.score) for each in found["ranked"]]
    assert_ranked(ranked, fleet.folder("reranker"), 2)
    assert_embedded([found["vector"]], fleet.folder("minilm"), ["a cat"])
    assert_embedded([each.embedding for each in found["documents"]], fleet.folder("minilm"), DOCUMENTS)


@pytest.mark.parametrize("direction", TruncationDirection)
def test_long_texts(fleet: Fleet, direction: TruncationDirection) -> None:
    ranker = HuggingFaceTEIRanker(url=fleet.url("reranker"), raw_scores=True)
    documents = [Document(content=text * 200) for text in DOCUMENTS]
    assert len(ranker.run(QUERY, documents, truncation_direction=direction)["documents"]) == len(DOCUMENTS)


def test_errors(fleet: Fleet) -> None:
    ranker = HuggingFaceTEIRanker(url=fleet.url("minilm"), max_retries=1)
    with pytest.raises(RuntimeError, match="424"):
        ranker.run(QUERY, [Document(content="a cat")])
