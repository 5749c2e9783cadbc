"""Templates of requests that docs/vector-stores.md has for Elasticsearch and OpenSearch, filled in as the stores do."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tests.server.live import ROOT, Live

TEXTS = ["a cat", 'a "kitten"']
QUERY = "a cat"
VALUES = {"input": json.dumps(TEXTS), "documents": json.dumps(TEXTS), "top_n": "2"}
PAGE = (ROOT / "docs" / "vector-stores.md").read_text()
TEMPLATES: list[str] = [json.loads(text) for text in re.findall(r'"request(?:_body)?": ("(?:[^"\\]|\\.)*")', PAGE)]
ELASTIC_RERANK, OPENSEARCH, OPENSEARCH_RERANK = TEMPLATES


@pytest.mark.parametrize(
    ("server_fixture", "path", "template", "query"),
    [
        ("server", "/v1/embeddings", OPENSEARCH, ""),
        ("reranker", "/v1/rerank", ELASTIC_RERANK, json.dumps(QUERY)),
        ("reranker", "/v1/rerank", OPENSEARCH_RERANK, QUERY),
    ],
)
def test_template(request: pytest.FixtureRequest, server_fixture: str, path: str, template: str, query: str) -> None:
    running: Live = request.getfixturevalue(server_fixture)
    values = {**VALUES, "model": running.get("/info").json()["served_model_name"], "query": query}
    body = re.sub(r"\$\{(?:parameters\.)?(\w+)\}", lambda found: values[found[1]], template)
    with running.client() as client:
        response = client.post(path, content=body.encode(), headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    assert "x-embert-ignored-fields" not in response.headers
    if path == "/v1/embeddings":
        found = [item["embedding"] for item in response.json()["data"]]
        expected = running.post("/embed", {"inputs": TEXTS}).json()
    else:
        found = [(item["index"], item["relevance_score"]) for item in response.json()["results"]]
        ranks = running.post("/rerank", {"query": QUERY, "texts": TEXTS}).json()
        expected = [(item["index"], item["score"]) for item in ranks]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
