"""Ollama's API: both forms of embeddings, names of models with and without a tag, and descriptions of models."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import httpx
import pytest

from tests.server.live import Live
from tests.server.refusals import check_refused

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
TEXTS = ["a cat", "a kitten"]
LONG = "word " * 400
IGNORED = "x-embert-ignored-fields"


def vectors(http: httpx.Client, texts: Any = TEXTS, **fields: Any) -> Any:
    return [item["embedding"] for item in http.post("/v1/embeddings", json={"input": texts, **fields}).json()["data"]]


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({}, {}),
        ({"input": "a cat"}, {"texts": "a cat"}),
        ({"model": MODEL}, {}),
        ({"model": f"{MODEL}:latest"}, {}),
        ({"dimensions": 8}, {"dimensions": 8}),
        ({"dimensions": 0, "truncate": None}, {}),
        ({"input": [LONG]}, {"texts": [LONG]}),
        ({"input": [LONG], "truncate": True}, {"texts": [LONG]}),
        ({"truncate": False, "keep_alive": "5m", "options": {"num_ctx": 2048}}, {}),
        ({"keep_alive": 0, "options": None}, {}),
    ],
    ids=lambda each: str(each)[:50],
)
def test_embed(http: httpx.Client, fields: dict[str, Any], same: dict[str, Any]) -> None:
    response = http.post("/api/embed", json={"input": TEXTS, **fields})
    found = response.json()
    assert list(found) == ["model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"]
    assert found["embeddings"] == vectors(http, **{"texts": TEXTS, **same})
    assert found["model"] == MODEL
    assert found["prompt_eval_count"] == int(response.headers["x-compute-tokens"]) > 0
    milliseconds = float(response.headers["server-timing"].rpartition("dur=")[2])
    assert 0 < found["total_duration"] <= milliseconds * 1e6 + 1e3
    assert response.headers.get(IGNORED, "") == ("keep_alive,options" if "keep_alive" in fields else "")
    assert "x-model" not in response.headers or "model" not in fields


def test_the_earlier_form_has_one_vector_as_the_model_makes_it(http: httpx.Client) -> None:
    response = http.post("/api/embeddings", json={"prompt": "a cat", "keep_alive": -1})
    assert response.headers[IGNORED] == "keep_alive"
    assert [response.json()["embedding"]] == vectors(http, ["a cat"], normalize=False)
    assert len(http.post("/api/embeddings", json={"prompt": LONG}).json()["embedding"]) == 384


@pytest.mark.parametrize("body", [{}, {"input": ""}, {"input": []}, {"input": None}])
def test_without_texts_there_are_no_vectors(http: httpx.Client, body: dict[str, Any]) -> None:
    """Clients of Ollama load a model so."""
    found = http.post("/api/embed", json=body).json()
    assert (found["embeddings"], found["prompt_eval_count"]) == ([], 0)
    assert http.post("/api/embeddings", json={"prompt": body.get("input") or None}).json() == {"embedding": []}


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("embed", {"input": TEXTS, "model": "nomic-embed-text"}, 404, ("model not found", MODEL, "nomic-embed-text")),
        ("embed", {"model": "nomic-embed-text:latest"}, 404, ("'nomic-embed-text:latest'",)),
        ("embed", {"input": TEXTS, "model": f"{MODEL}:v1.5"}, 404, ("not found",)),
        ("embed", {"input": TEXTS, "model": ":latest"}, 404, ("not found",)),
        ("embed", {"input": [*TEXTS, LONG], "truncate": False}, 422, ("text 2", "256")),
        ("embed", {"input": ["a", ""]}, 400, ("`input[1]`",)),
        ("embed", {"input": [101]}, 422, ("`input`", "a string or a list of strings")),
        ("embed", {"input": TEXTS, "dimensions": 385}, 422, ("`dimensions`", "1 to 384", "385")),
        ("embed", {"input": TEXTS, "truncate": "END"}, 422, ("`truncate`", "boolean")),
        ("embed", {"input": ["a"] * 2049}, 413, ("`input`", "2049", "2048")),
        ("embeddings", {"prompt": ["a"]}, 422, ("`prompt`", "string")),
        ("embeddings", {"prompt": "a", "model": "mxbai"}, 404, ("model not found", "'mxbai'")),
        ("show", {"model": "mxbai"}, 404, ("model not found", "'mxbai'")),
        ("show", {"name": "mxbai"}, 404, ("model not found", "'mxbai'")),
        ("generate", {"model": MODEL, "prompt": "a"}, 404, ("/api/generate",)),
    ],
    ids=lambda each: str(each)[:50],
)
def test_refused(http: httpx.Client, path: str, body: dict[str, Any], status: int, says: tuple[str, ...]) -> None:
    check_refused(http.post(f"/api/{path}", json=body), status, says)


def test_a_model_that_does_not_embed(reranker: Live) -> None:
    check_refused(reranker.post("/api/embed", {"input": "a"}), 400, ("embed",))
    assert reranker.post("/api/show", {}).json()["capabilities"] == []


def test_the_model_that_is_listed_is_the_one_that_is_shown(http: httpx.Client) -> None:
    (listed,) = http.get("/api/tags").json()["models"]
    assert listed["name"] == listed["model"] == f"{MODEL}:latest"
    assert listed["capabilities"] == ["embedding"]
    assert listed["size"] > 1e6
    assert len(listed["digest"]) == 64
    assert (listed["details"]["context_length"], listed["details"]["embedding_length"]) == (256, 384)
    shown = [
        http.post("/api/show", json={field: name}).json()
        for field in ("model", "name")
        for name in (listed["name"], MODEL, "text-embeddings-inference")
    ]
    assert all(each == shown[0] for each in shown)
    family = shown[0]["model_info"]["general.architecture"]
    assert shown[0]["model_info"][f"{family}.context_length"] == 256
    assert shown[0]["model_info"][f"{family}.embedding_length"] == 384
    assert {name: shown[0][name] for name in ("details", "capabilities", "modified_at")} == {
        name: listed[name] for name in ("details", "capabilities", "modified_at")
    }
    assert datetime.fromisoformat(listed["modified_at"]).tzinfo is not None
    assert http.get("/api/version").json() == {"version": http.get("/info").json()["version"]}
