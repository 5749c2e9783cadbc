"""`POST /`, SageMaker's and Vertex AI's routes, Azure's path, and requests that name another model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient

from embert.server.frontend.routes import error_formats_by_path, labels_by_path
from embert.server.http.errors import ErrorFormat
from tests.server.live import STAND_IN, Live, live
from tests.server.stand_in import FAIL, expected

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
AZURE = "/openai/deployments/{name}/embeddings"
SIMILARITY = {"inputs": {"source_sentence": "a cat", "sentences": ["a kitten", "a car"]}}


@pytest.fixture(scope="module")
def lenient() -> Iterator[Live]:
    """Any name of a model will do; token ids are taken; a key is needed."""
    options = ("--any-model-name", "--accept-token-ids", "--api-key", "secret")
    with live(
        *STAND_IN, *options, "--max-client-batch-size", "8", "--keyless", "probes", "--keyless", "metrics"
    ) as running:
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


def test_what_is_an_object_is_asked_of_the_key_alone(http: httpx.Client) -> None:
    for text in ('"inputs": {', "inputs", '{"inputs":{}}'):
        assert len(http.post("/", json={"user": text, "inputs": [text]}).json()) == 1
    wrong = http.post("/", json={"inputs": {}})
    assert (wrong.status_code, wrong.json()["error"]) == (422, "`inputs.source_sentence` is required")


def test_huggingface_hub_needs_no_path(server: Live) -> None:
    found = InferenceClient(server.url).sentence_similarity("a cat", other_sentences=["a kitten", "a car"])
    assert found == InferenceClient(f"{server.url}/similarity").sentence_similarity(
        "a cat", other_sentences=["a kitten", "a car"]
    )


# --- Vertex AI ---


def test_vertex(http: httpx.Client) -> None:
    bodies: list[dict[str, Any]] = [
        {"inputs": "a cat"}, {"inputs": ["a", "b " * 300], "dimensions": 3}, SIMILARITY, {"inputs": [[101, 102], "c"]},
    ]  # fmt: skip
    answer = http.post("/vertex", json={"instances": bodies, "parameters": {}}, headers={"accept": "*/*"})
    assert list(answer.json()) == ["predictions"]
    alone = [http.post("/", json=body) for body in bodies]
    for found, one in zip(answer.json()["predictions"], alone, strict=True):
        assert np.allclose(np.array(found), np.array(one.json()), atol=1e-6)
    assert answer.headers["x-truncated-texts"] == "1"
    for name in ("x-compute-tokens", "x-compute-characters"):
        assert int(answer.headers[name]) == sum(int(one.headers[name]) for one in alone)
    raw = http.post("/vertex", json={"instances": bodies[:1]}, headers={"accept": "application/octet-stream"})
    assert raw.json() == {"predictions": [alone[0].json()]}


@pytest.mark.parametrize(
    ("instances", "status", "says"),
    [
        ([], 400, "`instances` must not be an empty list"),
        (["a"], 422, "`instances[0]` must be an object"),
        ([{"inputs": "a"}, {}], 422, "instances[1]: `inputs` is required"),
        ([{"inputs": "a"}, {"inputs": ["a", ""]}], 400, "instances[1]: `inputs[1]` must not be empty"),
        ([{"inputs": "a"}, {"inputs": [101, FAIL, 102]}], 424, "instances[1]: inference failed"),
        ([{"inputs": "a"}] * 9, 413, "`instances` has 9 texts; the limit is 8"),
        ([{"inputs": ["a"] * 5}, {"inputs": {"sentences": ["a"] * 4}}], 413, "`instances` has 9 texts"),
        ([{"inputs": "a", "dimensions": 10**40}], 422, "instances[0]: `dimensions` must be 1 to 384"),
    ],
    ids=str,
)
def test_vertex_refuses(client: httpx.Client, instances: Any, status: int, says: str) -> None:
    refused = client.post("/vertex", json={"instances": instances})
    assert refused.status_code == status
    assert says in refused.json()["error"]


def test_large_instances(client: httpx.Client) -> None:
    """Bodies that are parsed step by step."""
    ids = [101, *[5, 6, 7, 8, 9] * 4000, 102]
    answer = client.post("/vertex", json={"instances": [{"inputs": [ids]}, {"inputs": "x " * 50_000}]})
    assert answer.headers["x-truncated-texts"] == "2"
    assert np.allclose(answer.json()["predictions"][0], [expected(ids[:256])], atol=1e-6)


def test_a_reranker(reranker: Live) -> None:
    ranking = {"query": "a cat", "texts": ["a car", "a kitten"]}
    alone = reranker.post("/rerank", ranking).json()
    for path in ("/", "/invocations"):
        assert reranker.post(path, ranking).json() == alone
        for inputs in ("a", [["a"], ["a", "b"]]):
            assert (
                reranker.post(path, {"inputs": inputs}).json() == reranker.post("/predict", {"inputs": inputs}).json()
            )
    answer = reranker.post("/vertex", {"instances": [ranking, {"inputs": "a"}]})
    ranked, predicted = answer.json()["predictions"]
    assert [each["index"] for each in ranked] == [each["index"] for each in alone]
    for together, single in ((ranked, alone), (predicted, reranker.post("/predict", {"inputs": "a"}).json())):
        first, second = ([each["score"] for each in found] for found in (together, single))
        assert np.allclose(first, second, rtol=0, atol=1e-6)  # in a batch with other texts a CPU's last bits may differ
    many = reranker.post("/vertex", {"instances": [{**ranking, "texts": ["a"] * 1500}] * 2})
    assert (many.status_code, "3000 texts; the limit is 2048" in many.text) == (413, True)


def test_hugging_faces_javascript_reads_a_list_for_one_text_too(classifier: Live) -> None:
    alone = classifier.post("/", {"inputs": "a cat"}).json()
    agent = {"user-agent": "@huggingface/inference/4.13.0 Node.js/24"}
    assert classifier.post("/", {"inputs": "a cat"}, headers=agent).json() == [alone]
    assert classifier.post("/", {"inputs": [["a cat"]]}, headers=agent).json() == [alone]


def test_a_classifier(classifier: Live) -> None:
    body = {"inputs": [["a cat"], ["a", "b"]]}
    alone = classifier.post("/predict", body).json()
    for path in ("/", "/invocations"):
        assert classifier.post(path, body).json() == alone
    assert classifier.post("/vertex", {"instances": [body]}).json() == {"predictions": [alone]}
    pooled = classifier.post("/pooling", {"input": "a cat"}).json()["data"][0]["data"]
    assert np.allclose(sorted(pooled, reverse=True), [each["score"] for each in alone[0]], atol=1e-6)
    logits = classifier.post("/pooling", {"input": "a cat", "task": "classify", "use_activation": False}).json()
    exponents = np.exp(logits["data"][0]["data"])
    assert np.allclose(pooled, exponents / exponents.sum(), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("splade", "sparse"),
        ("late_interaction", "multi_vector"),
        ("reranker", "classify, rerank"),
        ("classifier", "classify"),
    ],
)
def test_a_similarity_wants_a_model_that_embeds(request: pytest.FixtureRequest, name: str, has: str) -> None:
    """Clients send it to the address alone, whatever runs there."""
    running: Live = request.getfixturevalue(name)
    served = running.get("/info").json()["served_model_name"]
    said = f"{served} does not have the task embed; it has {has}"
    for path, body in (("/", SIMILARITY), ("/invocations", SIMILARITY), ("/vertex", {"instances": [SIMILARITY]})):
        refused = running.post(path, body)
        before = "instances[0]: " if path == "/vertex" else ""
        assert (refused.status_code, refused.json()) == (424, {"error": before + said, "error_type": "Backend"})


# --- Azure ---


def test_azures_client(lenient: Live, client: httpx.Client) -> None:
    """It writes the model into the path, and the key into a header of its own."""
    azure = {"azure_endpoint": lenient.url, "api_version": "2024-10-21", "max_retries": 0}
    for name in (MODEL, "my deployment"):
        with openai.AzureOpenAI(api_key="secret", **azure) as asking:  # type: ignore[call-overload]
            answer = asking.embeddings.create(model=name, input="a cat")
        assert answer.model == MODEL
        assert np.allclose(answer.data[0].embedding, expected([101, 1037, 4937, 102]), atol=1e-6)
    with openai.AzureOpenAI(api_key="wrong", **azure) as asking, pytest.raises(openai.AuthenticationError):  # type: ignore[call-overload]
        asking.embeddings.create(model=MODEL, input="a cat")
    counted = lenient.metrics()
    assert counted[f'embert_requests_total{{route="{AZURE}",status="200"}}'] == 2
    assert counted[f'embert_requests_total{{route="{AZURE}",status="401"}}'] == 1


def test_the_deployment_is_the_model(http: httpx.Client) -> None:
    assert http.post(AZURE.replace("{name}", MODEL), params={"api-version": "1"}, json={"input": "a"}).is_success
    other = http.post(AZURE.replace("{name}", "gpt"), json={"input": "a"})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    ids = http.post(AZURE.replace("{name}", MODEL), json={"input": [101, 102]})
    assert ids.is_success  # the path names this model


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/openai/deployments/a/embeddings", AZURE), ("/openai/deployments/a/b/embeddings", AZURE),
        ("/openai/deployments//embeddings", "other"), ("/openai/deployments/a/chat/completions", "other"),
        ("/openai/deployments/embeddings", "other"), ("/v1/models/a/b", "/v1/models/{id}"), ("/v1/models/", "other"),
    ],
)  # fmt: skip
def test_labels_of_paths_with_a_name(path: str, label: str) -> None:
    assert labels_by_path()[path] == label
    assert error_formats_by_path()[path] is ErrorFormat.OPENAI


# --- names of models ---


def test_teis_users_name_it_where_the_model_stands(http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"input": "a", "model": "text-embeddings-inference"})
    assert answer.json()["model"] == answer.headers["x-model"] == MODEL
    assert "x-model" not in http.post("/v1/embeddings", json={"input": "a", "model": MODEL}).headers
    refused = http.post("/v1/embeddings", json={"input": [101], "model": "text-embeddings-inference"})
    assert refused.status_code == 422  # ids may be of any model's tokenizer


def test_any_name(client: httpx.Client) -> None:
    answer = client.post("/v1/embeddings", json={"input": "a", "model": "text-embedding-3-small"})
    assert (answer.json()["model"], answer.headers["x-model"]) == (MODEL, MODEL)
    assert client.get("/v1/models/text-embedding-3-small").json()["id"] == MODEL
    refused = client.post("/v1/embeddings", json={"input": [101], "model": "text-embedding-3-small"})
    assert refused.status_code == 422
    assert "or name the served model in `model`" in refused.json()["error"]["message"]
    assert client.post("/v1/embeddings", json={"input": [101], "model": MODEL}).is_success


@pytest.mark.parametrize(
    ("headers", "status", "says"),
    [
        ({"api-key": "secret"}, 200, ""),
        ({"api-key": "wrong"}, 401, "is wrong"),
        ({"api-key": ""}, 401, "is missing"),
        ({}, 401, "is missing"),
        ({"api-key": "secret", "authorization": "Bearer wrong"}, 401, "is wrong"),
        ({"api-key": "wrong", "authorization": "Bearer secret"}, 200, ""),
        ({"authorization": "Basic secret"}, 401, "is wrong"),
    ],
)
def test_keys_of_azures_kind(lenient: Live, headers: dict[str, str], status: int, says: str) -> None:
    answer = lenient.post("/embed", {"inputs": "a"}, headers=headers)
    assert answer.status_code == status
    assert says in answer.text


# --- texts and ids in one list ---


def test_mixed_lists(client: httpx.Client) -> None:
    given = ["a cat", [101, 5, 102], "a", [6]]
    ids = [[101, 1037, 4937, 102], [101, 5, 102], [101, 1037, 102], [6]]
    answer = client.post("/embed", json={"inputs": given})
    assert np.allclose(answer.json(), [expected(each) for each in ids], atol=1e-6)
    assert answer.headers["x-compute-tokens"] == "11"
    assert answer.headers["x-compute-characters"] == "6"
    rows = client.post("/embed_all", json={"inputs": given}).json()
    assert [len(each) for each in rows] == [4, 3, 3, 1]


def test_large_mixed_lists(client: httpx.Client) -> None:
    """On the tokenizer's threads, and cut."""
    ids = [5, 6] * 10_000
    answer = client.post("/embed", json={"inputs": ["x " * 50_000, ids, "a cat"]})
    assert np.allclose(answer.json()[1:], [expected(ids[:256]), expected([101, 1037, 4937, 102])], atol=1e-6)
    assert answer.headers["x-truncated-texts"] == "2"


@pytest.mark.parametrize(
    ("inputs", "status", "says"),
    [
        (["a", []], 400, "`inputs[1]` must not be empty"),
        (["a", [101, 30522]], 422, "sequence 1 has the token id 30522"),
        (["a", [1] * 300], 422, "text 1 has 300 tokens, the limit is 256"),
        ([[101], "a", "b " * 300], 422, "text 2 has 302 tokens, the limit is 256"),
        (["a", [101]] * 5, 413, "`inputs` has 10 texts; the limit is 8"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_errors_in_mixed_lists_name_the_place(client: httpx.Client, inputs: Any, status: int, says: str) -> None:
    refused = client.post("/embed", json={"inputs": inputs, "truncate": False})
    assert refused.status_code == status
    assert says in refused.json()["error"]


def test_a_prompt_is_for_texts(client: httpx.Client) -> None:
    refused = client.post("/embed", json={"inputs": ["a", [101]], "prompt_name": "query"})
    assert "`prompt_name` cannot be used with token ids" in refused.json()["error"]
