"""A model with adapters over HTTP: what chooses one, in every format, and texts of several in one request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from tests.oracles.jina_v3 import INSTRUCTIONS, TASKS, VOCABULARY, Jina, flash
from tests.oracles.model_cases import byte_level
from tests.server.live import Live, live
from tests.server.refusals import check_refused

Floats = npt.NDArray[np.float64]
QUERY, PASSAGE = "retrieval.query", "retrieval.passage"


@pytest.fixture(scope="module")
def jina(tmp_path_factory: pytest.TempPathFactory) -> Jina:
    return flash(tmp_path_factory.mktemp("jina"))


@pytest.fixture(scope="module")
def adapted(jina: Jina) -> Iterator[Live]:
    with live(
        str(jina.folder), "--device", "cpu", "--served-model-name", "jina", "--openai-accepts", "token-ids"
    ) as running:
        yield running


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_level(VOCABULARY).encode(text).ids
    return ids


def expected(jina: Jina, text: str | list[int], task: str | None, prompt: str | None = None) -> Floats:
    """The oracle's vector. The prompt of a text is its task's unless it has another."""
    if isinstance(text, str):
        text = ids_of((INSTRUCTIONS.get(task or "", "") if prompt is None else prompt) + text)
    pooled: Floats = jina.hidden(np.array(text), task).mean(0)
    return pooled / np.linalg.norm(pooled)


def vectors(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    found = response.json()
    if isinstance(found, dict):
        return [item.get("embedding") or item["data"] for item in found["data"]]
    return found


@pytest.mark.parametrize(
    ("fields", "task", "prompt"),
    [
        ({}, None, None),
        *(({"task": task}, task, None) for task in TASKS),
        ({"prompt_name": PASSAGE}, PASSAGE, None),
        ({"task": "separation", "prompt_name": QUERY}, "separation", "query: "),
        ({"input_type": "query"}, QUERY, None),
        ({"input_type": "search_document"}, PASSAGE, None),
        ({"input_type": "query", "task": "text-matching"}, "text-matching", None),
        ({"input_type": "document", "prompt_name": QUERY}, QUERY, None),
    ],
)
def test_what_chooses_an_adapter(
    adapted: Live, jina: Jina, fields: dict[str, Any], task: str | None, prompt: str | None
) -> None:
    wanted = expected(jina, "a cat", task, prompt)
    for path, field in (("/v1/embeddings", "input"), ("/embed", "inputs"), ("/", "inputs")):
        if "input_type" in fields and field == "inputs":
            continue
        np.testing.assert_allclose(vectors(adapted.post(path, {field: "a cat", **fields}))[0], wanted, atol=1e-5)


def test_other_routes(adapted: Live, jina: Jina) -> None:
    for fields, task in (({"input_type": "query"}, QUERY), ({"input_type": "document"}, PASSAGE), ({}, None)):
        wanted = expected(jina, "a cat", task)
        np.testing.assert_allclose(
            vectors(adapted.post("/pooling", {"input": "a cat", **fields}))[0], wanted, atol=1e-5
        )
        hidden = jina.hidden(np.array(ids_of(INSTRUCTIONS.get(task or "", "") + "a cat")), task)
        every = adapted.post("/embed_all", {"inputs": "a cat", **fields}).json()[0]
        np.testing.assert_allclose(every, hidden, atol=2e-4)
    body = {"inputs": {"source_sentence": "a cat", "sentences": ["a dog"]}, "parameters": {"task": "text-matching"}}
    cosine = expected(jina, "a cat", "text-matching") @ expected(jina, "a dog", "text-matching")
    np.testing.assert_allclose(adapted.post("/similarity", body).json(), [cosine], atol=1e-5)
    tokens = adapted.post("/tokenize", {"inputs": "a cat", "prompt_name": QUERY}).json()[0]
    assert [token["id"] for token in tokens] == ids_of("query: a cat")


def test_token_ids_have_an_adapter_and_no_prompt(adapted: Live, jina: Jina) -> None:
    ids = ids_of("a cat")
    body: dict[str, Any] = {"inputs": [ids, "a cat"], "task": QUERY}
    wanted = [expected(jina, ids, QUERY), expected(jina, "a cat", QUERY)]
    np.testing.assert_allclose(vectors(adapted.post("/embed", body)), wanted, atol=1e-5)
    body = {"input": ids, "task": QUERY, "model": "jina"}
    np.testing.assert_allclose(vectors(adapted.post("/v1/embeddings", body))[0], wanted[0], atol=1e-5)
    refused = adapted.post("/embed", {"inputs": ids, "prompt_name": QUERY})
    check_refused(refused, 422, ["`prompt_name` cannot be used with token ids"])


def test_instances_of_all_adapters(adapted: Live, jina: Jina) -> None:
    tasks = [*TASKS, None, QUERY]
    texts = [f"{'a cat ' * number}{number}" for number in range(len(tasks))]
    body = {"instances": [{"inputs": text, "task": task} for text, task in zip(texts, tasks, strict=True)]}
    responses = adapted.post("/vertex", body).json()["predictions"]
    wanted = [expected(jina, text, task) for text, task in zip(texts, tasks, strict=True)]
    np.testing.assert_allclose([response[0] for response in responses], wanted, atol=1e-5)


def test_info_and_the_document_list_them(adapted: Live) -> None:
    info = adapted.get("/info").json()
    assert (info["adapters"], info["prompts"]) == ([*TASKS], sorted(TASKS))
    schemas = adapted.get("/openapi.json").json()["components"]["schemas"]
    for name in ("EmbeddingsRequest", "EmbedRequest", "SimilarityParameters"):
        assert schemas[name]["properties"]["task"]["anyOf"] == [{"type": "string", "enum": [*TASKS]}, {"type": "null"}]
    assert "separation" not in schemas["PoolingRequest"]["properties"]["task"]["anyOf"][0]["enum"]


LISTED = ("`task`", ", ".join(TASKS), "'retrieval'")
SIMILARITY = {"source_sentence": "a", "sentences": ["a"]}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/embeddings", {"input": "a", "task": "retrieval"}, LISTED),
        ("/v1/embeddings", {"input": "a", "task": 3}, ("`task`", "3")),
        ("/v1/embeddings", {"input": "a", "input_type": "image"}, ("`input_type`",)),
        ("/embed", {"inputs": "a", "task": "retrieval"}, LISTED),
        ("/embed_all", {"inputs": "a", "task": "x" * 200}, ("a string of 200 characters",)),
        ("/similarity", {"inputs": SIMILARITY, "parameters": {"task": "retrieval"}}, LISTED),
        ("/vertex", {"instances": [{"inputs": "a", "task": "retrieval"}]}, ("instances[0]", *LISTED)),
    ],
)
def test_refused(adapted: Live, path: str, body: dict[str, Any], says: tuple[str, ...]) -> None:
    refused = adapted.post(path, body)
    check_refused(refused, 422, says)
    if path == "/v1/embeddings":
        assert refused.json()["error"]["param"] == says[0].strip("`")


def test_a_model_without_adapters_refuses_a_task(http: httpx.Client) -> None:
    for path, field in (("/v1/embeddings", "input"), ("/embed_all", "inputs")):
        check_refused(http.post(path, json={field: "a", "task": QUERY}), 422, ("`task`", "all-MiniLM-L6-v2"))
        assert http.post(path, json={field: "a", "input_type": "query", "task": None}).status_code == 200
