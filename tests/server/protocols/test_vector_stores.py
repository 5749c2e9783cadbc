"""Requests of the vector stores in docs/vector-stores.md, byte by byte, and their responses as the stores read them.

Templates are the page's own. Other bodies are what the stores' sources serialize: Go writes fields in the order of the
struct, and of a map by name; so does Typesense's nlohmann::json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.server.live import ROOT, Live

TEXTS = ["a cat", 'a "kitten"']
QUERY = "a cat"
KEY = {"authorization": "Bearer none"}
JSON = {"content-type": "application/json"}
MODELS = {"server": "sentence-transformers/all-MiniLM-L6-v2", "reranker": "reranker"}
COMPACT = json.dumps(TEXTS, separators=(",", ":"))
TEMPLATES: list[str] = [
    json.loads(text)
    for text in re.findall(
        r'"request(?:_body)?": ("(?:[^"\\]|\\.)*")', (ROOT / "docs" / "vector-stores.md").read_text()
    )
]
ELASTIC_RERANK, OPENSEARCH, OPENSEARCH_RERANK = TEMPLATES


def fill(template: str, **values: str) -> str:
    """The template with values in place of `${name}` and `${parameters.name}`."""
    return re.sub(r"\$\{(?:parameters\.)?(\w+)\}", lambda found: values[found[1]], template)


def data(body: Any) -> Any:
    assert [item["index"] for item in body["data"]] == [0, 1]
    return [item["embedding"] for item in body["data"]]


def results(body: Any) -> Any:
    return [(item["index"], item["relevance_score"]) for item in body["results"]]


def ranks(body: Any) -> Any:
    return [(item["index"], item["score"]) for item in body]


# store, path, header fields, body in which MODEL stands for the model's name, what the store reads
EMBED: list[tuple[str, str, dict[str, str], str, Callable[[Any], Any]]] = [
    ("Elasticsearch", "/v1/embeddings", KEY | JSON, f'{{"input":{COMPACT},"model":"MODEL"}}', data),
    ("OpenSearch", "/v1/embeddings", KEY | JSON, fill(OPENSEARCH, input=COMPACT, model="MODEL"), data),
    ("Milvus", "/embed", JSON, f'{{"inputs":{COMPACT},"truncate":true}}', list),
    ("Weaviate, text2vec-openai", "/v1/embeddings", KEY | JSON, f'{{"input":{COMPACT},"model":"MODEL"}}', data),
    (
        "Weaviate, text2vec-ollama",
        "/api/embed",
        {},
        f'{{"model":"MODEL","input":{COMPACT}}}',
        lambda b: b["embeddings"],
    ),
    ("Typesense", "/v1/embeddings", KEY | JSON, f'{{"input":{COMPACT},"model":"MODEL"}}', data),
]
RERANK: list[tuple[str, str, dict[str, str], str, Callable[[Any], Any]]] = [
    ("Elasticsearch", "/v1/rerank", KEY | JSON,
     fill(ELASTIC_RERANK, query=json.dumps(QUERY), input=COMPACT), results),
    ("OpenSearch", "/v1/rerank", KEY | JSON,
     fill(OPENSEARCH_RERANK, documents=COMPACT, query=QUERY, model="MODEL", top_n="2"), results),
    ("Milvus", "/rerank", JSON, f'{{"query":"{QUERY}","texts":{COMPACT},"truncate":true}}', ranks),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "path", "headers", "body", "read"),
    [
        pytest.param(model, *row[1:], id=f"{row[0]}: {row[1]}")
        for model, rows in (("server", EMBED), ("reranker", RERANK))
        for row in rows
    ],
)
def test_a_stores_request(
    request: pytest.FixtureRequest,
    model: str,
    path: str,
    headers: dict[str, str],
    body: str,
    read: Callable[[Any], Any],
) -> None:
    running: Live = request.getfixturevalue(model)
    with running.client() as client:
        response = client.post(path, content=body.replace("MODEL", MODELS[model]).encode(), headers=headers)
        assert response.status_code == 200, response.text
        assert "x-embert-ignored-fields" not in response.headers
        found = read(response.json())
        if model == "server":
            assert np.allclose(found, client.post("/embed", json={"inputs": TEXTS}).json(), rtol=0, atol=1e-6)
        else:
            expected = ranks(client.post("/rerank", json={"query": QUERY, "texts": TEXTS}).json())
            assert np.allclose(found, expected, rtol=0, atol=1e-6)


def test_typesense_finds_the_model_in_the_list(server: Live) -> None:
    assert MODELS["server"] in [each["id"] for each in server.get("/v1/models", headers=KEY).json()["data"]]
