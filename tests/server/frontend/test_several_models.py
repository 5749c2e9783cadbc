"""Several models in one server: which one serves a request, by name, by path or by task, and the limits of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from embert.engine import load_model
from embert.server.config import ConfigError
from embert.server.frontend.routes import model_paths
from tests.server.live import Live, Samples, live
from tests.server.models import build_classifier, copy_model, edit_json, three_heads, write_config
from tests.server.refusals import check_refused

QUERY = {"query": "a cat", "documents": ["a car", "a kitten"]}
RANKS = {"query": "a cat", "texts": ["a car", "a kitten"]}
SIMILARITY = {"inputs": {"source_sentence": "a cat", "sentences": ["a kitten", "a car"]}}
IDS = [101, 1037, 4937, 102]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by the names that they get here; those of tests/conftest.py, where these have the same."""
    folder = tmp_path_factory.mktemp("several")
    heads = three_heads(folder / "heads")
    edit_json(heads / "config_sentence_transformers.json", prompts={"heading": "heading: "})
    return {
        "org/rank": build_classifier(folder / "rank", "relevance", seed=37),
        "dense": copy_model(folder / "dense"),
        "heads": heads,
        "labels": build_classifier(folder / "labels", "negative", "neutral", "positive", seed=31),
    }


@pytest.fixture(scope="module")
def several(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A reranker, two models of dense vectors of which the second has sparse and multi-vectors, and a classifier."""
    more: dict[str, dict[str, Any]] = {
        "dense": {"max_client_batch_size": 4},
        "heads": {"low_priority": True, "max_client_batch_size": 8},
    }
    models = [{"name": name, "model": str(folder), **more.get(name, {})} for name, folder in folders.items()]
    config = write_config(tmp_path_factory.mktemp("config") / "models.toml", *models)
    with live("--config", config, "--device", "cpu", "--openai-accepts", "token-ids", "--api-key", "secret") as running:
        yield running


@pytest.fixture(scope="module")
def client(several: Live) -> Iterator[httpx.Client]:
    with several.client(headers={"authorization": "Bearer secret"}) as client:
        yield client


def same(response: Any, expected: Any) -> bool:
    """Equal but for ids and times of responses; floats nearly."""
    if isinstance(expected, dict):
        names = expected.keys() - {"id", "created", "model"}
        return response.keys() == expected.keys() and all(same(response[name], expected[name]) for name in names)
    if isinstance(expected, list):
        return len(response) == len(expected) and all(map(same, response, expected))
    return (
        bool(np.isclose(response, expected, atol=1e-5)) if isinstance(expected, float) else bool(response == expected)
    )


# --- by the name in the body ---

BY_BODY: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/embeddings", {"input": "a cat"}, "dense", "server"),
    ("/v1/embeddings", {"input": "a", "embedding_types": ["sparse", "dense", "colbert"]}, "heads", "three_heads"),
    ("/pooling", {"input": "a cat"}, "labels", "classifier"),
    ("/api/embeddings", {"prompt": "a cat"}, "dense", "server"),
    ("/classify", {"input": "a cat"}, "labels", "classifier"),
    ("/score", {"queries": "a cat", "documents": ["b"]}, "org/rank", "reranker"),
    ("/v1/rerank", QUERY, "org/rank", "reranker"),
]


@pytest.mark.parametrize(("path", "body", "name", "single"), BY_BODY)
def test_the_named_model_serves_the_request(
    request: pytest.FixtureRequest, client: httpx.Client, path: str, body: dict[str, Any], name: str, single: str
) -> None:
    """A server of this model alone gives the same response."""
    running: Live = request.getfixturevalue(single)
    expected = running.post(path, body).json()
    response = client.post(path, json={**body, "model": name})
    assert response.status_code == 200, response.text
    assert "x-model" not in response.headers
    assert response.json().get("model", name) == name
    assert same(response.json(), expected)
    below = client.post(f"/models/{name}{path}", json=body)
    assert same(below.json(), expected)
    assert "x-model" not in below.headers


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/embeddings", {"input": "a"}, "dense"),
        ("/v1/embeddings", {"input": "a", "embedding_types": ["dense", "sparse"]}, "heads"),
        ("/pooling", {"input": "a"}, "org/rank"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "dense"),
        ("/classify", {"input": "a"}, "org/rank"),
        ("/score", {"text_1": "a", "text_2": "b"}, "org/rank"),
        ("/v1/rerank", {**QUERY, "model": "default/not-specified"}, "org/rank"),
        ("/rerank", RANKS, "org/rank"),
        ("/rerank", {**RANKS, "model": "labels"}, "org/rank"),  # which TEI's routes do not read
        ("/predict", {"inputs": "a"}, "org/rank"),
        ("/embed", {"inputs": "a"}, "dense"),
        ("/api/embed", {"input": "a"}, "dense"),
        ("/api/show", {}, "org/rank"),
        ("/embed_sparse", {"inputs": "a"}, "heads"),
        ("/similarity", SIMILARITY, "dense"),
        # Of the first model, whatever it can do.
        ("/", RANKS, "org/rank"),
        ("/vertex", {"instances": [RANKS, {"inputs": "a"}]}, "org/rank"),
        ("/tokenize", {"inputs": "a"}, "org/rank"),
        ("/decode", {"ids": IDS}, "org/rank"),
    ],
)
@pytest.mark.parametrize("named", [{}, {"model": "text-embeddings-inference"}], ids=["unnamed", "tei"])
def test_without_a_name_the_first_model_with_the_task_serves(
    client: httpx.Client, path: str, body: dict[str, Any], name: str, named: dict[str, str]
) -> None:
    response = client.post(path, json={**named, **body})
    assert response.status_code == 200, response.text
    assert response.headers["x-model"] == name
    assert client.post(path, json={**named, **body}).headers["x-model"] == name  # remembered


NAMES = ("org/rank", "dense", "heads", "labels")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1/embeddings", NAMES),
        ("/classify", NAMES),
        ("/models/heads/v1/embeddings", ("heads",)),
        ("/models/gpt/v1/embeddings", NAMES),
    ],
)
def test_the_error_of_an_unknown_name_lists_the_known_ones(
    client: httpx.Client, path: str, says: tuple[str, ...]
) -> None:
    refused = client.post(path, json={"input": "a", "model": "gpt"})
    check_refused(refused, 404, (*says, "'gpt'"))
    assert refused.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/rerank", {**QUERY, "model": "dense"}, 400, ("dense", "rerank", "embed, tokens", "name org/rank")),
        ("/v1/rerank", {**QUERY, "model": "labels"}, 400, ("labels", "rerank", "one label", "3", "name org/rank")),
        ("/classify", {"input": "a", "model": "heads"}, 400, ("name org/rank or labels",)),
        ("/v1/embeddings", {"input": "a", "model": "org/rank"}, 400, ("name dense or heads",)),
        ("/v1/embeddings", {"input": "a", "model": "dense", "embedding_types": ["sparse"]}, 400, ("name heads",)),
        ("/pooling", {"input": "a", "model": "labels", "task": "embed"}, 400, ("name dense or heads",)),
        ("/models/dense/rerank", RANKS, 424, ("dense", "rerank", "name org/rank")),
        ("/", SIMILARITY, 424, ("org/rank", "embed", "name dense or heads")),
        ("/vertex", {"instances": [SIMILARITY]}, 424, ("instances[0]", "org/rank", "embed")),
    ],
)
def test_a_model_without_the_task_names_those_that_have_it(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, says: tuple[str, ...]
) -> None:
    check_refused(client.post(path, json=body), status, says)


# --- by the name in the path ---


@pytest.mark.parametrize("name", ["heads", "org/rank", "org%2Frank", "org%2frank"])
def test_every_route_is_below_a_models_name(client: httpx.Client, name: str) -> None:
    ranks = "rank" in name
    for route, body in (
        ("/", RANKS if ranks else {"inputs": "a"}),
        ("", RANKS if ranks else {"inputs": "a"}),
        ("/invocations", RANKS if ranks else SIMILARITY),
        ("/vertex", {"instances": [RANKS if ranks else SIMILARITY]}),
        ("/tokenize", {"inputs": "a"}),
        ("/decode", {"ids": IDS}),
        ("/predict" if ranks else "/embed_sparse", {"inputs": "a"}),
    ):
        response = client.post(f"/models/{name}{route}", json=body)
        assert response.status_code == 200, (route, response.text)
    assert client.get(f"/models/{name}/info").json()["served_model_name"] == ("org/rank" if ranks else "heads")


def test_a_model_id_is_a_name_too(client: httpx.Client, folders: dict[str, Path]) -> None:
    model_id = client.get("/models/dense/info").json()["model_id"]
    assert model_id not in folders
    response = client.post("/v1/embeddings", json={"input": "a", "model": model_id})
    assert response.json()["model"] == "dense"
    assert client.post(f"/models/{model_id}/embed", json={"inputs": "a"}).status_code == 200


def test_path_and_body_name_the_same_model(client: httpx.Client) -> None:
    body = {"input": "a", "model": "dense"}
    assert client.post("/models/dense/v1/embeddings", json=body).status_code == 200
    check_refused(client.post("/models/heads/v1/embeddings", json=body), 404, ("`model`", "heads", "'dense'"))
    response = client.post("/models/heads/v1/embeddings", json={**body, "model": "text-embeddings-inference"})
    assert response.headers["x-model"] == response.json()["model"] == "heads"


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/models/gpt/embed", 404, "'gpt'"),
        ("/models/rank/embed", 404, "'rank'"),
        ("/models/org/rank/v1", 404, "no such route"),
        ("/models/dense/embed/", 404, "/models/dense/embed is one"),
        ("/models//embed", 404, "no such route"),
        ("/models/embed", 404, "no such route"),
        ("/models/Dense/embed", 404, "'Dense'"),
        ("/models/dense%2Fembed", 200, ""),
    ],
)
def test_paths_are_exact(client: httpx.Client, path: str, status: int, says: str) -> None:
    response = client.post(path, json={"inputs": "a"})
    assert response.status_code == status
    assert says in response.text


def test_errors_below_a_models_name_have_the_format_of_the_route(several: Live, client: httpx.Client) -> None:
    for path in ("/models/gpt/v2/rerank", "/models/org/rank/v2/rerank"):
        assert list(client.post(path, json={}).json()) == ["id", "message"]
    assert client.post("/models/gpt/rerank", json=RANKS).json()["error_type"] == "Validation"
    method = client.get("/models/dense/v1/embeddings")
    assert (method.status_code, method.headers["allow"]) == (405, "POST")
    assert "GET" in method.json()["error"]["message"]
    keyless = several.post("/models/dense/embed", {"inputs": "a"})
    assert (keyless.status_code, keyless.json()["error_type"]) == (401, "Unauthorized")


def test_azures_form_has_the_model_in_the_path(several: Live) -> None:
    """Some clients write the name of OpenAI's model into the body."""
    path = "/openai/deployments/heads/embeddings"
    for name in ("dense", "text-embedding-ada-002", ""):
        other = several.post(path, {"input": "a", "model": name}, headers={"api-key": "secret"})
        assert other.json()["model"] == "heads"
    refused = several.post(path.replace("heads", "gpt"), {"input": "a"}, headers={"api-key": "secret"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_token_ids_need_the_models_name_in_body_or_path(client: httpx.Client) -> None:
    ids = {"input": [IDS]}
    assert client.post("/v1/embeddings", json={**ids, "model": "heads"}).status_code == 200
    assert client.post("/models/heads/v1/embeddings", json=ids).status_code == 200
    assert client.post("/models/heads/pooling", json=ids).status_code == 200
    assert client.post("/v1/embeddings", json=ids).status_code == 422


def test_names_that_would_share_a_path_are_refused() -> None:
    registry: Any = SimpleNamespace(by_name={name: SimpleNamespace(model=load_model()) for name in ("a", "a/v1")})
    with pytest.raises(ConfigError, match=r"'a' and 'a/v1' .* /models/a/v1/"):
        model_paths(registry)


# --- limits and priority of each ---


def test_limits_are_of_each_model(client: httpx.Client) -> None:
    """Bodies are parsed before the model is known, within the largest limits."""
    texts = ["a " * 20_000] * 5
    for model, status in (("dense", 413), ("heads", 200)):
        response = client.post("/v1/embeddings", json={"input": texts, "model": model})
        assert response.status_code == status
        assert client.post(f"/models/{model}/embed", json={"inputs": ["a"] * 5}).status_code == status


def test_a_priority_is_the_headers_else_the_models(client: httpx.Client) -> None:
    def counted(model: str, priority: str) -> float:
        labels = f'model="{model}",priority="{priority}",route="/embed",status="200"'
        return Samples.parse(client.get("/metrics").text).get(f"embert_requests_total{{{labels}}}")

    for model, header, priority in (
        ("heads", {}, "bulk"),
        ("heads", {"x-priority": "interactive"}, "interactive"),
        ("dense", {}, "interactive"),
        ("dense", {"x-priority": "bulk"}, "bulk"),
    ):
        before = counted(model, priority)
        assert client.post(f"/models/{model}/embed", json={"inputs": "a"}, headers=header).status_code == 200
        assert counted(model, priority) == before + 1, (model, header)


# --- operations ---


def test_the_models_are_listed(client: httpx.Client) -> None:
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == [*NAMES]
    assert [each["name"] for each in client.get("/api/tags").json()["models"]] == [f"{name}:latest" for name in NAMES]
    assert client.get("/v1/models/org/rank").json()["id"] == "org/rank"
    unknown = client.get("/v1/models/gpt")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "id")
    assert client.get("/v1/models/text-embeddings-inference").json()["id"] == "org/rank"
    assert all(name in client.get("/").text for name in NAMES)


def test_info_is_of_the_first_and_of_each(client: httpx.Client) -> None:
    info = client.get("/info").json()
    each = info.pop("models")
    assert info == each[0] == client.get("/models/org/rank/info").json()
    assert [(facts["served_model_name"], facts["tasks"]) for facts in each] == [
        ("org/rank", ["classify", "rerank"]),
        ("dense", ["embed", "tokens"]),
        ("heads", ["embed", "tokens", "sparse", "multi_vector"]),
        ("labels", ["classify"]),
    ]
    assert [facts["max_client_batch_size"] for facts in each] == [2048, 4, 8, 2048]
    assert client.get("/models/gpt/info").json()["error_type"] == "Validation"


def test_readiness_is_that_of_each(several: Live) -> None:
    """Probes need no key."""
    assert several.get("/readyz").json() == {"status": "ready", "detail": "", "models": dict.fromkeys(NAMES, "ready")}
    for name in NAMES:
        response = several.get(f"/readyz/{name.replace('/', '%2F')}")
        assert (response.status_code, response.json()["models"]) == (200, {name: "ready"})
    assert several.get("/readyz/gpt").status_code == 401
    assert several.get("/readyz/gpt", headers={"authorization": "Bearer secret"}).status_code == 404


def test_the_document_is_of_all_models(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert "* `heads`: embed, tokens, sparse, multi_vector\n" in document["info"]["description"]
    schemas = document["components"]["schemas"]
    fields = schemas["EmbeddingsRequest"]["properties"]
    assert fields["prompt_name"]["anyOf"][0]["enum"] == ["heading"]
    assert fields["input"]["anyOf"][1]["maxItems"] == 2048
    assert fields["dimensions"]["anyOf"][0]["maximum"] == 384
    missing = [path for path, item in document["paths"].items() if item.get("post", {}).get("x-task-missing")]
    decides = ["/v1/decisions", "/v1/systemone", "/v1/decide"]
    assert missing == ["/zero_shot", "/token_classify", *decides]  # none of these models has such a head
