"""Several models in one server: who answers, by name, by path or by task, and what each may do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient

from tests.server.live import STAND_IN, Live, live, run_cli
from tests.server.models import build_classifier, copy_model, edit_json, three_heads, write_config

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
        "heads": {"priority": "bulk", "max_client_batch_size": 8},
    }
    models = [{"name": name, "model": str(folder), **more.get(name, {})} for name, folder in folders.items()]
    config = write_config(tmp_path_factory.mktemp("config") / "models.toml", *models)
    with live("--config", config, "--device", "cpu", "--accept-token-ids", "--api-key", "secret") as running:
        yield running


@pytest.fixture(scope="module")
def client(several: Live) -> Iterator[httpx.Client]:
    with several.client(headers={"authorization": "Bearer secret"}) as client:
        yield client


def same(answer: Any, expected: Any) -> bool:
    """Equal but for what is made anew for each answer; floats nearly."""
    if isinstance(expected, dict):
        kept = expected.keys() - {"id", "created", "model"}
        return answer.keys() == expected.keys() and all(same(answer[name], expected[name]) for name in kept)
    if isinstance(expected, list):
        return len(answer) == len(expected) and all(map(same, answer, expected))
    return bool(np.isclose(answer, expected, atol=1e-5)) if isinstance(expected, float) else bool(answer == expected)


# --- by the name in the body ---

BY_BODY: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/embeddings", {"input": "a cat"}, "dense", "server"),
    ("/embeddings", {"input": ["a cat", "b"]}, "heads", "three_heads"),
    ("/v1/embeddings", {"input": "a", "embedding_types": ["sparse", "dense", "colbert"]}, "heads", "three_heads"),
    ("/pooling", {"input": "a cat"}, "dense", "server"),
    ("/pooling", {"input": "a cat"}, "labels", "classifier"),
    ("/pooling", {"input": "a cat", "task": "token_embed"}, "heads", "three_heads"),
    ("/classify", {"input": "a cat"}, "labels", "classifier"),
    ("/score", {"queries": "a cat", "documents": ["b"]}, "org/rank", "reranker"),
    ("/v1/rerank", QUERY, "org/rank", "reranker"),
    ("/v2/rerank", QUERY, "org/rank", "reranker"),
    ("/rerank", QUERY, "org/rank", "reranker"),
]


@pytest.mark.parametrize(("path", "body", "name", "alone"), BY_BODY)
def test_the_named_model_answers(
    request: pytest.FixtureRequest, client: httpx.Client, path: str, body: dict[str, Any], name: str, alone: str
) -> None:
    """As it does in a server of its own."""
    single: Live = request.getfixturevalue(alone)
    expected = single.post(path, body).json()
    answer = client.post(path, json={**body, "model": name})
    assert answer.status_code == 200, answer.text
    assert "x-model" not in answer.headers
    assert answer.json().get("model", name) == name
    assert same(answer.json(), expected)
    below = client.post(f"/models/{name}{path}", json=body)
    assert same(below.json(), expected)
    assert "x-model" not in below.headers


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/embeddings", {"input": "a"}, "dense"),
        ("/v1/embeddings", {"input": "a", "embedding_types": ["dense", "sparse"]}, "heads"),
        ("/v1/embeddings", {"input": "a", "embedding_types": ["colbert"]}, "heads"),
        ("/pooling", {"input": "a"}, "org/rank"),
        ("/pooling", {"input": "a", "task": "embed"}, "dense"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "dense"),
        ("/pooling", {"input": "a", "task": "classify"}, "org/rank"),
        ("/classify", {"input": "a"}, "org/rank"),
        ("/score", {"text_1": "a", "text_2": "b"}, "org/rank"),
        ("/v1/rerank", QUERY, "org/rank"),
        ("/v1/rerank", {**QUERY, "model": "default/not-specified"}, "org/rank"),
        ("/rerank", RANKS, "org/rank"),
        ("/rerank", {**RANKS, "model": "labels"}, "org/rank"),  # which TEI's routes do not read
        ("/predict", {"inputs": "a"}, "org/rank"),
        ("/embed", {"inputs": "a"}, "dense"),
        ("/embed_all", {"inputs": "a"}, "dense"),
        ("/embed_sparse", {"inputs": "a"}, "heads"),
        ("/similarity", SIMILARITY, "dense"),
        # Of the first model, whatever it can do.
        ("/", RANKS, "org/rank"),
        ("/invocations", RANKS, "org/rank"),
        ("/vertex", {"instances": [RANKS, {"inputs": "a"}]}, "org/rank"),
        ("/tokenize", {"inputs": "a"}, "org/rank"),
        ("/decode", {"ids": IDS}, "org/rank"),
    ],
)
@pytest.mark.parametrize("named", [{}, {"model": "text-embeddings-inference"}], ids=["unnamed", "tei"])
def test_without_a_name_the_first_that_can(
    client: httpx.Client, path: str, body: dict[str, Any], name: str, named: dict[str, str]
) -> None:
    answer = client.post(path, json={**named, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-model"] == name
    assert client.post(path, json={**named, **body}).headers["x-model"] == name  # remembered


@pytest.mark.parametrize(("path", "code"), [("/v1/embeddings", "model_not_found"), ("/classify", "model_not_found")])
def test_an_unknown_name_is_answered_with_those_that_there_are(client: httpx.Client, path: str, code: str) -> None:
    for refused in (
        client.post(path, json={"input": "a", "model": "gpt"}),
        client.post(f"/models/heads{path}".replace("classify", "pooling"), json={"input": "a", "model": "gpt"}),
    ):
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (404, code, "model")
    assert all(value in error["message"] for value in ("`model`", "heads", "'gpt'"))
    message = client.post(path, json={"input": "a", "model": "gpt"}).json()["error"]["message"]
    assert all(value in message for value in ("`model`", "org/rank, dense, heads, labels", "'gpt'"))


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/rerank", {**QUERY, "model": "dense"}, 400,
         "dense does not have the task rerank; it has embed, tokens; name org/rank for it"),
        ("/v1/rerank", {**QUERY, "model": "labels"}, 400,
         "labels does not have the task rerank, which needs a model of one label and not of 3; it has classify; "
         "name org/rank for it"),
        ("/classify", {"input": "a", "model": "heads"}, 400, "name org/rank or labels for it"),
        ("/v1/embeddings", {"input": "a", "model": "org/rank"}, 400, "name dense or heads for it"),
        ("/v1/embeddings", {"input": "a", "model": "dense", "embedding_types": ["sparse"]}, 400,
         "dense does not have the task sparse; it has embed, tokens; name heads for it"),
        ("/pooling", {"input": "a", "model": "labels", "task": "embed"}, 400, "name dense or heads for it"),
        ("/models/dense/rerank", RANKS, 424, "dense does not have the task rerank; it has embed, tokens; name org/"),
        ("/models/labels/embed", {"inputs": "a"}, 424, "labels does not have the task embed; it has classify; name "),
        ("/", SIMILARITY, 424, "org/rank does not have the task embed; it has classify, rerank; name dense or heads"),
        ("/vertex", {"instances": [SIMILARITY]}, 424, "instances[0]: org/rank does not have the task embed; it has"),
    ],
)  # fmt: skip
def test_a_model_without_the_task_names_those_that_have_it(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, says: str
) -> None:
    refused = client.post(path, json=body)
    assert refused.status_code == status
    assert says in refused.text


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
        answer = client.post(f"/models/{name}{route}", json=body)
        assert answer.status_code == 200, (route, answer.text)
    assert client.get(f"/models/{name}/info").json()["served_model_name"] == ("org/rank" if ranks else "heads")


def test_a_model_id_is_a_name_too(client: httpx.Client, folders: dict[str, Path]) -> None:
    model_id = client.get("/models/dense/info").json()["model_id"]
    assert model_id not in folders
    answer = client.post("/v1/embeddings", json={"input": "a", "model": model_id})
    assert answer.json()["model"] == "dense"
    assert client.post(f"/models/{model_id}/embed", json={"inputs": "a"}).status_code == 200


def test_path_and_body_name_the_same_model(client: httpx.Client) -> None:
    body = {"input": "a", "model": "dense"}
    assert client.post("/models/dense/v1/embeddings", json=body).status_code == 200
    other = client.post("/models/heads/v1/embeddings", json=body)
    assert other.status_code == 404
    assert all(value in other.json()["error"]["message"] for value in ("`model`", "heads", "'dense'"))
    answer = client.post("/models/heads/v1/embeddings", json={**body, "model": "text-embeddings-inference"})
    assert answer.headers["x-model"] == answer.json()["model"] == "heads"


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/models/gpt/embed", 404, "the model in the path must be one of org/rank, dense, heads, labels; it is 'gpt'"),
        ("/models/rank/embed", 404, "it is 'rank'"),
        ("/models/org/rank/v1", 404, "no such route"),
        ("/models/dense/embed/", 404, "/models/dense/embed is one"),
        ("/models//embed", 404, "no such route"),
        ("/models/embed", 404, "no such route"),
        ("/models/Dense/embed", 404, "it is 'Dense'"),
        ("/models/dense%2Fembed", 200, ""),
    ],
)
def test_paths_are_exact(client: httpx.Client, path: str, status: int, says: str) -> None:
    answer = client.post(path, json={"inputs": "a"})
    assert answer.status_code == status
    assert says in answer.text


def test_errors_below_a_models_name_are_in_the_routes_dialect(client: httpx.Client) -> None:
    unknown = client.post("/models/gpt/v1/embeddings", json={"input": "a"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert list(client.post("/models/gpt/v2/rerank", json=QUERY).json()) == ["id", "message"]
    assert list(client.post("/models/org/rank/v2/rerank", json={}).json()) == ["id", "message"]
    assert client.post("/models/gpt/rerank", json=RANKS).json()["error_type"] == "Validation"
    method = client.get("/models/dense/v1/embeddings")
    assert (method.status_code, method.headers["allow"]) == (405, "POST")
    assert "GET" in method.json()["error"]["message"]
    keyless = httpx.post(str(client.base_url.join("/models/dense/embed")), json={"inputs": "a"})
    assert (keyless.status_code, keyless.json()["error_type"]) == (401, "Unauthorized")


def test_azures_client(several: Live) -> None:
    """It writes the model into the path, and some write it into the body too."""
    azure = {"azure_endpoint": several.url, "api_version": "2024-10-21", "max_retries": 0, "api_key": "secret"}
    with openai.AzureOpenAI(**azure) as asking:  # type: ignore[call-overload]
        for name in ("dense", "heads"):
            assert asking.embeddings.create(model=name, input="a cat").model == name
        with pytest.raises(openai.NotFoundError, match="one of org/rank, dense, heads, labels; it is 'gpt'"):
            asking.embeddings.create(model="gpt", input="a cat")
    path = "/openai/deployments/heads/embeddings"
    other = several.post(path, {"input": "a", "model": "dense"}, headers={"api-key": "secret"})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


def test_clients_that_name_no_model_get_its_address(several: Live) -> None:
    """They post to the address itself, whatever they want."""
    heads = InferenceClient(f"{several.url}/models/heads", token="secret")
    assert heads.feature_extraction(["a cat", "b"]).shape == (2, 384)
    assert len(heads.sentence_similarity("a cat", other_sentences=["a kitten", "a car"])) == 2
    labels = InferenceClient(f"{several.url}/models/labels", token="secret")
    assert {element.label for element in labels.text_classification("a cat")} == {"negative", "neutral", "positive"}


def test_token_ids_need_the_models_name_in_body_or_path(client: httpx.Client) -> None:
    ids = {"input": [IDS]}
    assert client.post("/v1/embeddings", json={**ids, "model": "heads"}).status_code == 200
    assert client.post("/models/heads/v1/embeddings", json=ids).status_code == 200
    assert client.post("/models/heads/pooling", json=ids).status_code == 200
    assert client.post("/v1/embeddings", json=ids).status_code == 422


def test_names_that_would_share_a_path_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    models = [{"name": name, "model": str(folders["dense"])} for name in ("a", "a/v1")]
    ended = run_cli("serve", "--port", "0", "--config", write_config(tmp_path / "models.toml", *models), *STAND_IN)
    assert ended.returncode == 1
    assert "the models 'a' and 'a/v1' would have the same path /models/a/v1/" in ended.stderr


# --- limits and priority of each ---


def test_limits_are_those_of_the_model(client: httpx.Client) -> None:
    """Bodies are parsed before the model is known, within the largest limits."""
    texts = ["a " * 20_000] * 5
    for model, status in (("dense", 413), ("heads", 200)):
        answer = client.post("/v1/embeddings", json={"input": texts, "model": model})
        assert answer.status_code == status
        assert client.post(f"/models/{model}/embed", json={"inputs": ["a"] * 5}).status_code == status
    assert (
        "`input` has 5 texts; the limit is 4 (--max-client-batch-size)"
        in client.post("/v1/embeddings", json={"input": ["a"] * 5}).text
    )


def test_a_priority_is_the_headers_else_the_models(several: Live, client: httpx.Client) -> None:
    def counted(model: str, priority: str) -> float:
        text = client.get("/metrics").text
        labels = f'route="/embed",model="{model}",priority="{priority}",status="200"'
        (value, *_) = [
            line.split()[-1]
            for line in text.splitlines()
            if line.startswith("embert_requests_total{") and all(label in line for label in labels.split(","))
        ] or ["0"]
        return float(value)

    for model, header, priority in (
        ("heads", {}, "bulk"),
        ("heads", {"x-priority": "interactive"}, "interactive"),
        ("dense", {}, "interactive"),
        ("dense", {"x-priority": "bulk"}, "bulk"),
    ):
        before = counted(model, priority)
        assert client.post(f"/models/{model}/embed", json={"inputs": "a"}, headers=header).status_code == 200
        assert counted(model, priority) == before + 1, (model, header)
    assert several.process.poll() is None


# --- operations ---


def test_the_models_are_listed(several: Live, client: httpx.Client) -> None:
    names = ["org/rank", "dense", "heads", "labels"]
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == names
    assert client.get("/v1/models/org/rank").json()["id"] == "org/rank"
    unknown = client.get("/v1/models/gpt")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "id")
    assert client.get("/v1/models/text-embeddings-inference").json()["id"] == "org/rank"
    with openai.OpenAI(base_url=f"{several.url}/v1", api_key="secret") as asking:
        assert [model.id for model in asking.models.list()] == names


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
    assert client.get("/models/gpt/info").json() == {
        "error": "the model in the path must be one of org/rank, dense, heads, labels; it is 'gpt'",
        "error_type": "Validation",
    }


def test_readiness_is_that_of_each(several: Live) -> None:
    """Probes need no key."""
    names = ("org/rank", "dense", "heads", "labels")
    assert several.get("/readyz").json() == {"status": "ready", "detail": "", "models": dict.fromkeys(names, "ready")}
    for name in names:
        answer = several.get(f"/readyz/{name.replace('/', '%2F')}")
        assert (answer.status_code, answer.json()["models"]) == (200, {name: "ready"})
    assert several.get("/readyz/gpt").status_code == 401
    assert several.get("/readyz/gpt", headers={"authorization": "Bearer secret"}).status_code == 404


def test_the_root_names_the_models(client: httpx.Client) -> None:
    hint = client.get("/").text
    assert "Models: org/rank, dense, heads, labels." in hint


def test_the_document_is_of_all_models(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert "* `heads`: embed, tokens, sparse, multi_vector\n" in document["info"]["description"]
    schemas = document["components"]["schemas"]
    fields = schemas["EmbeddingsRequest"]["properties"]
    assert fields["prompt_name"]["anyOf"][0]["enum"] == ["heading"]
    assert fields["input"]["anyOf"][1]["maxItems"] == 2048
    assert fields["dimensions"]["anyOf"][0]["maximum"] == 384
    assert not [path for path, item in document["paths"].items() if item.get("post", {}).get("x-task-missing")]
    for path, item in document["paths"].items():
        if "post" in item and "{" not in path:
            example = item["post"]["requestBody"]["content"]["application/json"]["example"]
            assert client.post(path, json=example).status_code == 200, path
