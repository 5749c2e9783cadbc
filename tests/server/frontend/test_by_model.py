"""`POST /`, SageMaker's and Vertex AI's routes, Azure's path, and requests that name another model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.server.live import STAND_IN, Live, live
from tests.server.refusals import check_refused
from tests.server.stand_in import FAIL, expected

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
AZURE = "/openai/deployments/{name}/embeddings"
SIMILARITY = {"inputs": {"source_sentence": "a cat", "sentences": ["a kitten", "a car"]}}
RANKING = {"query": "a cat", "texts": ["a car", "a kitten"]}


@pytest.fixture(scope="module")
def lenient() -> Iterator[Live]:
    """Any name of a model will do; token ids are taken; a key is needed."""
    options = (
        "--openai-accepts",
        "any-model",
        "--openai-accepts",
        "token-ids",
        "--api-key",
        "secret",
        "--max-client-batch-size",
        "8",
    )
    with live(*STAND_IN, *options, "--keyless", "probes", "--keyless", "metrics") as running:
        yield running


@pytest.fixture(scope="module")
def client(lenient: Live) -> Iterator[httpx.Client]:
    with lenient.client(headers={"authorization": "Bearer secret"}) as client:
        yield client


# --- by model and body ---


@pytest.mark.parametrize("path", ["/", "/invocations"])
def test_the_routes_of_an_embedding_model(http: httpx.Client, path: str) -> None:
    body = {"inputs": ["a cat", [101, 102]], "normalize": False, "dimensions": 7}
    assert http.post(path, json=body).content == http.post("/embed", json=body).content
    assert http.post(path, json=SIMILARITY).content == http.post("/similarity", json=SIMILARITY).content
    raw = http.post(path, json=body, headers={"accept": "application/octet-stream"})
    assert raw.headers["x-embedding-shape"] == "2,7"


def test_only_an_object_in_inputs_is_a_similarity(http: httpx.Client) -> None:
    for text in ('"inputs": {', "inputs", '{"inputs":{}}'):
        assert len(http.post("/", json={"user": text, "inputs": [text]}).json()) == 1
    check_refused(http.post("/", json={"inputs": {}}), 422, ["`inputs.source_sentence`"])


def scores(results: list[dict[str, Any]]) -> list[float]:
    return [each["score"] for each in results]


def test_the_routes_of_a_reranker_and_of_a_classifier(reranker: Live, classifier: Live) -> None:
    ranking = reranker.post("/rerank", RANKING).json()
    labels = {"inputs": [["a cat"], ["a", "b"]]}
    for path in ("/", "/invocations"):
        assert reranker.post(path, RANKING).json() == ranking
        for server in (reranker, classifier):
            assert server.post(path, labels).json() == server.post("/predict", labels).json()
    ranked, predicted = reranker.post("/vertex", {"instances": [RANKING, {"inputs": "a"}]}).json()["predictions"]
    assert [each["index"] for each in ranked] == [each["index"] for each in ranking]
    # In a batch with other texts a CPU's last bits may differ.
    assert np.allclose(scores(ranked), scores(ranking), rtol=0, atol=1e-6)
    assert np.allclose(scores(predicted), scores(reranker.post("/predict", {"inputs": "a"}).json()), rtol=0, atol=1e-6)
    many = reranker.post("/vertex", {"instances": [{**RANKING, "texts": ["a"] * 1500}] * 2})
    check_refused(many, 413, ("3000", "2048"))


def test_hugging_faces_javascript_reads_a_list_for_one_text_too(classifier: Live) -> None:
    labels = classifier.post("/", {"inputs": "a cat"}).json()
    agent = {"user-agent": "@huggingface/inference/4.13.0 Node.js/24"}
    for inputs in ("a cat", [["a cat"]]):
        assert classifier.post("/", {"inputs": inputs}, headers=agent).json() == [labels]


@pytest.mark.parametrize(
    ("name", "tasks"),
    [("splade", "sparse"), ("late_interaction", "multi_vector, rerank"), ("reranker", "classify, rerank")],
)
def test_a_similarity_needs_a_model_that_embeds(request: pytest.FixtureRequest, name: str, tasks: str) -> None:
    """Clients send it to the address itself, for any model."""
    running: Live = request.getfixturevalue(name)
    for path, body in (("/", SIMILARITY), ("/invocations", SIMILARITY), ("/vertex", {"instances": [SIMILARITY]})):
        check_refused(running.post(path, body), 424, ("embed", tasks, "instances[0]" if path == "/vertex" else ""))


# --- Vertex AI ---


def test_vertex(http: httpx.Client) -> None:
    bodies: list[dict[str, Any]] = [
        {"inputs": "a cat"}, {"inputs": ["a", "b " * 300], "dimensions": 3}, SIMILARITY, {"inputs": [[101, 102], "c"]},
    ]  # fmt: skip
    response = http.post("/vertex", json={"instances": bodies, "parameters": {}}, headers={"accept": "*/*"})
    assert list(response.json()) == ["predictions"]
    singles = [http.post("/", json=body) for body in bodies]
    for prediction, single in zip(response.json()["predictions"], singles, strict=True):
        assert np.allclose(np.array(prediction), np.array(single.json()), atol=1e-6)
    assert response.headers["x-truncated-texts"] == "1"
    for name in ("x-compute-tokens", "x-compute-characters"):
        assert int(response.headers[name]) == sum(int(single.headers[name]) for single in singles)
    raw = http.post("/vertex", json={"instances": bodies[:1]}, headers={"accept": "application/octet-stream"})
    assert raw.json() == {"predictions": [singles[0].json()]}


@pytest.mark.parametrize(
    ("instances", "status", "says"),
    [
        ([], 400, ("`instances`",)),
        (["a"], 422, ("`instances[0]`",)),
        ([{"inputs": "a"}, {}], 422, ("instances[1]", "`inputs`")),
        ([{"inputs": "a"}, {"inputs": ["a", ""]}], 400, ("instances[1]", "`inputs[1]`")),
        ([{"inputs": "a"}, {"inputs": [101, FAIL, 102]}], 424, ("instances[1]",)),
        ([{"inputs": "a"}] * 9, 413, ("`instances`", "9", "8")),
        ([{"inputs": ["a"] * 5}, {"inputs": {"sentences": ["a"] * 4}}], 413, ("`instances`", "9")),
        ([{"inputs": "a", "dimensions": 10**40}], 422, ("instances[0]", "`dimensions`", "1 to 384")),
    ],
    ids=lambda each: str(each)[:40],
)
def test_vertex_refuses(client: httpx.Client, instances: Any, status: int, says: tuple[str, ...]) -> None:
    check_refused(client.post("/vertex", json={"instances": instances}), status, says)


def test_large_instances(client: httpx.Client) -> None:
    """Bodies that are parsed step by step."""
    ids = [101, *[5, 6, 7, 8, 9] * 4000, 102]
    response = client.post("/vertex", json={"instances": [{"inputs": [ids]}, {"inputs": "x " * 50_000}]})
    assert response.headers["x-truncated-texts"] == "2"
    assert np.allclose(response.json()["predictions"][0], [expected(ids[:256])], atol=1e-6)


# --- names of models ---


def test_the_deployment_is_the_model(http: httpx.Client) -> None:
    assert http.post(AZURE.replace("{name}", MODEL), params={"api-version": "1"}, json={"input": "a"}).is_success
    other = http.post(AZURE.replace("{name}", "gpt"), json={"input": "a"})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    for extra in ({}, {"model": "text-embedding-ada-002"}):
        ids = http.post(AZURE.replace("{name}", MODEL), json={"input": [101, 102], **extra})
        assert ids.is_success  # the path names this model
    for wrong in ("/openai/deployments//embeddings", "/openai/deployments/a/chat/completions"):
        assert http.post(wrong, json={"input": "a"}).json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/embeddings", "input"), ("/pooling", "input"), ("/v2/embed", "texts")]
)
def test_an_empty_name_counts_as_absent(http: httpx.Client, path: str, field: str) -> None:
    response = http.post(path, json={field: ["a"], "model": ""})
    assert response.status_code == 200
    assert "x-model" not in response.headers


def test_teis_users_name_it_instead_of_the_model(http: httpx.Client) -> None:
    response = http.post("/v1/embeddings", json={"input": "a", "model": "text-embeddings-inference"})
    assert response.json()["model"] == response.headers["x-model"] == MODEL
    assert "x-model" not in http.post("/v1/embeddings", json={"input": "a", "model": MODEL}).headers
    refused = http.post("/v1/embeddings", json={"input": [101], "model": "text-embeddings-inference"})
    assert refused.status_code == 422  # ids may be of any model's tokenizer


def test_any_model_name(client: httpx.Client) -> None:
    response = client.post("/v1/embeddings", json={"input": "a", "model": "text-embedding-3-small"})
    assert (response.json()["model"], response.headers["x-model"]) == (MODEL, MODEL)
    assert client.get("/v1/models/text-embedding-3-small").json()["id"] == MODEL
    check_refused(
        client.post("/v1/embeddings", json={"input": [101], "model": "text-embedding-3-small"}), 422, ["`model`"]
    )
    assert client.post("/v1/embeddings", json={"input": [101], "model": MODEL}).is_success


# --- texts and ids in one list ---


def test_mixed_lists(client: httpx.Client) -> None:
    inputs = ["a cat", [101, 5, 102], "a", [6]]
    ids = [[101, 1037, 4937, 102], [101, 5, 102], [101, 1037, 102], [6]]
    response = client.post("/embed", json={"inputs": inputs})
    assert np.allclose(response.json(), [expected(each) for each in ids], atol=1e-6)
    assert response.headers["x-compute-tokens"] == "11"
    assert response.headers["x-compute-characters"] == "6"
    rows = client.post("/embed_all", json={"inputs": inputs}).json()
    assert [len(each) for each in rows] == [4, 3, 3, 1]
    long = [5, 6] * 10_000  # on the tokenizer's threads, and cut
    response = client.post("/embed", json={"inputs": ["x " * 50_000, long, "a cat"]})
    assert np.allclose(response.json()[1:], [expected(long[:256]), expected(ids[0])], atol=1e-6)
    assert response.headers["x-truncated-texts"] == "2"


@pytest.mark.parametrize(
    ("inputs", "status", "says"),
    [
        (["a", []], 400, ("`inputs[1]`",)),
        (["a", [101, 30522]], 422, ("sequence 1", "30522")),
        (["a", [1] * 300], 422, ("text 1", "300", "256")),
        ([[101], "a", "b " * 300], 422, ("text 2", "302", "256")),
        (["a", [101]] * 5, 413, ("`inputs`", "10", "8")),
    ],
    ids=lambda each: str(each)[:30],
)
def test_errors_in_mixed_lists(client: httpx.Client, inputs: Any, status: int, says: tuple[str, ...]) -> None:
    check_refused(client.post("/embed", json={"inputs": inputs, "truncate": False}), status, says)
