"""cohere: both versions of its rerank API."""

from __future__ import annotations

import asyncio
from typing import Any

import cohere
import pytest

from tests.clients.conftest import Fleet, Page
from tests.clients.oracles import DOCUMENTS, QUERY, assert_ranked


def pairs(response: Any) -> list[tuple[int, float]]:
    return [(result.index, result.relevance_score) for result in response.results]


def test_the_page(page: Page, fleet: Fleet) -> None:
    found = page("cohere")
    assert_ranked(pairs(found["ranked"]), fleet.folder("reranker"), 2)
    assert_ranked(pairs(found["with_documents"]), fleet.folder("reranker"))
    assert [each.document.text for each in found["with_documents"].results] == [
        DOCUMENTS[each.index] for each in found["with_documents"].results
    ]
    for response in (found["ranked"], found["with_documents"]):
        assert response.id
        assert response.meta.api_version.version in ("1", "2")
        assert response.meta.tokens.input_tokens > 0


def test_asynchronously(fleet: Fleet) -> None:
    async def ask(kind: Any) -> Any:
        client = kind(api_key="none", base_url=fleet.url("reranker"))
        return await client.rerank(model="reranker", query=QUERY, documents=DOCUMENTS)

    for kind in (cohere.AsyncClient, cohere.AsyncClientV2):
        assert_ranked(pairs(asyncio.run(ask(kind))), fleet.folder("reranker"))


def test_errors(fleet: Fleet) -> None:
    for kind in (cohere.Client, cohere.ClientV2):
        client = kind(api_key="none", base_url=fleet.url("reranker"))
        with pytest.raises(cohere.NotFoundError) as unknown:
            client.rerank(model="rerank-v3.5", query=QUERY, documents=DOCUMENTS)
        assert "rerank-v3.5" in str(unknown.value.body)
        with pytest.raises((cohere.BadRequestError, cohere.UnprocessableEntityError)) as empty:
            client.rerank(model="reranker", query=QUERY, documents=[])
        assert "documents" in str(empty.value.body)
    with pytest.raises((cohere.BadRequestError, cohere.UnprocessableEntityError)) as fields:
        cohere.Client(api_key="none", base_url=fleet.url("reranker")).rerank(
            model="reranker", query=QUERY, documents=[{"title": "a", "text": "b"}], rank_fields=["title"]
        )
    assert "rank_fields" in str(fields.value.body)
