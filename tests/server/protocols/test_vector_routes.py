"""Sparse vectors and multi-vectors: TEI's routes, and OpenAI's with `embedding_types`."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from embert import engine
from embert.engine import Task
from embert.engine.batch import PackedBatch, TaskOutput, cumulative
from embert.engine.heads.description import Heads, MultiVector, Role
from embert.engine.heads.late_interaction import multi_vector_mask
from embert.engine.models.encoder_config import Adapters
from embert.engine.tokenization.encoded import TokenizeOptions
from embert.server.config import ModelConfig
from embert.server.registry.model_handle import ModelHandle
from tests.server.live import Live
from tests.server.refusals import check_refused
from tests.server.stand_in import token_vectors

Floats = npt.NDArray[np.float32]

RAW = {"accept": "application/octet-stream"}
TEXTS = ["a cat, a dog", "Bonjour", "a " * 300]


def pairs(ids: list[int]) -> list[dict[str, float]]:
    """The stand-in's sparse vector."""
    indices, counts = np.unique(ids, return_counts=True)
    return [{"index": i, "value": count / 2} for i, count in zip(indices.tolist(), counts.tolist(), strict=True)]


def raw(response: httpx.Response) -> tuple[Floats, list[int]]:
    assert response.headers["content-type"] == "application/octet-stream", response.text
    rows, columns = map(int, response.headers["x-embedding-shape"].split(","))
    counts = [int(count) for count in response.headers["x-sequence-rows"].split(",")]
    assert sum(counts) == rows
    return np.frombuffer(response.content, "<f4").reshape(rows, columns), counts


# --- sparse vectors ---


def test_sparse(splade: Live) -> None:
    body: dict[str, Any] = {"inputs": ["a cat", [101, 5, 5, 102], "a a"], "truncate": True, "prompt_name": None}
    response = splade.post("/embed_sparse", body)
    assert response.json() == [pairs([101, 1037, 4937, 102]), pairs([101, 5, 5, 102]), pairs([101, 1037, 1037, 102])]
    assert splade.post("/embed_sparse", {"inputs": "a cat"}).json() == [pairs([101, 1037, 4937, 102])]
    left = splade.post("/embed_sparse", {"inputs": "cat " + "a " * 600, "truncation_direction": "Left"}).json()
    assert 4937 not in [pair["index"] for pair in left[0]]
    assert splade.post("/", {"inputs": "a cat"}).json() == [pairs([101, 1037, 4937, 102])]


def test_a_model_of_sparse_vectors_refuses_other_tasks(splade: Live) -> None:
    for path, status in (("/embed", 424), ("/embed_all", 424), ("/v1/embeddings", 400)):
        check_refused(splade.post(path, {"inputs": "a", "input": "a"}), status, ["it has sparse"])
    item = splade.post("/v1/embeddings", {"input": "a cat", "embedding_types": ["sparse"]}).json()["data"][0]
    assert item == {
        "object": "embedding", "embedding": [], "index": 0,
        "sparse": {"indices": [101, 102, 1037, 4937], "values": [0.5] * 4},
    }  # fmt: skip


# --- several kinds of vectors of one text ---


@pytest.fixture(scope="module")
def oracle(three_heads: Live) -> dict[Task, TaskOutput]:
    """All rows of TEXTS, by the engine itself; multi-vectors as of documents."""
    model = engine.load_model(three_heads.get("/info").json()["model_id"])
    encoded = engine.Tokenizer(model).encode(TEXTS, TokenizeOptions(is_query=False))
    offsets = cumulative(encoded.lengths)
    tasks = Task.EMBED | Task.SPARSE | Task.MULTI
    encoder = engine.load_encoder(model, device="cpu")
    rows = encoder.wait(encoder.submit(PackedBatch(encoded.ids, offsets, tasks=np.full(3, tasks, np.uint8))))
    head = model.heads.multi_vector
    assert head is not None
    return {**rows, Task.MULTI: rows[Task.MULTI].where(multi_vector_mask(encoded.ids, offsets, head, is_query=False))}


@pytest.mark.parametrize("form", ["float", "base64"])
def test_three_kinds(three_heads: Live, oracle: dict[Task, TaskOutput], form: str) -> None:
    body = {"input": TEXTS, "embedding_types": ["dense", "sparse", "colbert"], "encoding_format": form}
    response = three_heads.post("/v1/embeddings", body)
    assert response.headers["x-truncated-texts"] == "1"

    def vector(value: Any) -> Floats:
        return np.frombuffer(base64.b64decode(value), "<f4") if form == "base64" else np.array(value, np.float32)

    for index, item in enumerate(response.json()["data"]):
        assert list(item) == ["object", "embedding", "index", "sparse", "multi_vector", "token_ids"]
        assert np.allclose(vector(item["embedding"]), oracle[Task.EMBED].values[index], atol=1e-5)
        sparse = oracle[Task.SPARSE].slice(index, index + 1)
        assert sparse.indices is not None
        assert item["sparse"]["indices"] == sparse.indices.tolist()
        assert np.allclose(item["sparse"]["values"], sparse.values[:, 0], atol=1e-5)
        multi = oracle[Task.MULTI].slice(index, index + 1).values
        assert np.allclose([vector(row) for row in item["multi_vector"]], multi, atol=1e-5)
    assert len(item["multi_vector"]) == 255  # bge-m3's first token has no vector


def test_some_kinds(three_heads: Live, oracle: dict[Task, TaskOutput]) -> None:
    body = {"input": TEXTS, "embedding_types": ["colbert"]}
    item = three_heads.post("/v1/embeddings", body).json()["data"][0]
    assert list(item) == ["object", "embedding", "index", "multi_vector", "token_ids"]
    assert item["embedding"] == []
    rows, counts = raw(three_heads.post("/v1/embeddings", body, headers=RAW))
    assert counts == oracle[Task.MULTI].counts.tolist()
    assert np.allclose(rows, oracle[Task.MULTI].values, atol=1e-5)
    body["embedding_types"] = ["dense"]
    dense = three_heads.post("/v1/embeddings", {**body, "dimensions": 3}).json()
    assert dense["data"] == three_heads.post("/v1/embeddings", {"input": TEXTS, "dimensions": 3}).json()["data"]
    both = three_heads.post("/v1/embeddings", {"input": TEXTS, "embedding_types": ["dense", "sparse"]}, headers=RAW)
    assert both.headers["content-type"] == "application/json"  # rows of two kinds do not form a table


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"embedding_types": []}, ("`embedding_types`", "dense, sparse and colbert")),
        ({"embedding_types": ["dense", "int8"]}, ("`embedding_types[1]`",)),
        ({"embedding_types": "dense"}, ("`embedding_types`", "a string of 5")),
        ({"embedding_types": ["sparse"], "dimensions": 3}, ("`dimensions`",)),
        ({"embedding_types": ["colbert"], "input_type": "clustering"}, ("`input_type`",)),
    ],
)
def test_kinds_that_are_refused(three_heads: Live, fields: dict[str, Any], says: tuple[str, ...]) -> None:
    check_refused(three_heads.post("/v1/embeddings", {"input": "a", **fields}), 422, says)


# --- late interaction ---


def test_queries_and_documents(late_interaction: Live) -> None:
    """Documents have no vectors for commas; queries are filled up with [MASK] to 8 tokens."""
    document = token_vectors([101, 2, 1037, 4937, 102], 16)  # [CLS] [unused1] a cat [SEP], and a comma
    query = token_vectors([101, 1, 1037, 1010, 102, 103, 103, 103], 16)
    for text, role, expected, ids in (
        ("a, cat", "document", document, [101, 2, 1037, 4937, 102]),
        ("a,", "query", query, [101, 1, 1037, 1010, 102, 103, 103, 103]),
    ):
        kinds = {"embedding_types": ["colbert"]}
        for path, body in (
            ("/embed_all", {"inputs": text}),
            ("/", {"inputs": [text]}),
            ("/invocations", {"inputs": text}),
            ("/v1/embeddings", {"input": text, **kinds}),
            ("/pooling", {"input": text}),
        ):
            response = late_interaction.post(path, {**body, "input_type": role}).json()
            item = response["data"][0] if isinstance(response, dict) else {"data": response[0]}
            assert np.allclose(item.get("data") or item["multi_vector"], expected, atol=1e-6)
            assert item.get("token_ids", ids) == ids
    assert len(late_interaction.post("/embed_all", {"inputs": "a cat"}).json()[0]) == 5
    rows = late_interaction.post("/embed_all", {"inputs": [101, 1010, 5]}).json()[0]
    assert np.allclose(rows, token_vectors([101, 5], 16), atol=1e-6)  # as they are, as of a document


def test_raw_token_vectors(late_interaction: Live, http: httpx.Client) -> None:
    rows, counts = raw(late_interaction.post("/embed_all", {"inputs": ["a, cat", [1010], "a"]}, headers=RAW))
    assert counts == [5, 0, 4]
    assert (rows[5:] == np.array(late_interaction.post("/embed_all", {"inputs": "a"}).json()[0], np.float32)).all()
    assert [*map(len, late_interaction.post("/embed_all", {"inputs": [[1010], "a", [1010]]}).json())] == [0, 4, 0]
    hidden, counts = raw(http.post("/embed_all", json={"inputs": ["Hello, world", "a"]}, headers=RAW))
    assert (counts, hidden.shape[1]) == ([5, 3], 384)
    written = http.post("/embed_all", json={"inputs": ["Hello, world", "a"]}).json()
    assert (hidden == np.array([row for text in written for row in text], np.float32)).all()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed_all", {"inputs": ["a " * 30] * 3}),
        ("/v1/embeddings", {"input": ["a " * 30] * 3, "embedding_types": ["colbert"]}),
        ("/pooling", {"input": ["a " * 30] * 3}),
        ("/vertex", {"instances": [{"inputs": "a " * 30}] * 3}),
    ],
)
def test_token_vectors_of_a_request_are_one_batch_at_most(
    late_interaction: Live, path: str, body: dict[str, Any]
) -> None:
    check_refused(late_interaction.post(path, body), 413, ("72", "64"))


@pytest.mark.parametrize(
    ("adapters", "config", "expected"),
    [
        (None, ModelConfig(), [("a: ", -1), ("query: ", -1), ("passage: ", -1)]),
        (None, ModelConfig(default_prompt="cat "), [("cat ", -1)] * 3),
        (None, ModelConfig(default_prompt_name="a"), [("a: ", -1)] * 3),
        (Adapters(("a", "b"), 4, 1.0), ModelConfig(default_prompt_name="b"), [("", 1)] * 2),
        (Adapters(("a", "b"), 4, 1.0), ModelConfig(default_prompt="c"), [("c", -1)] * 2),
    ],
)
def test_a_default_prompt_of_the_server_replaces_the_models(
    adapters: Adapters | None, config: ModelConfig, expected: list[tuple[str, int]]
) -> None:
    """A prompt with the name of an adapter chooses it. No adapter here is that of queries."""
    roles = MultiVector((), query=Role("query: "), document=Role("passage: "))
    model: Any = SimpleNamespace(
        model_id="", max_input_length=24, prompts={"a": "a: ", "b": ""}, config=SimpleNamespace(adapters=adapters),
        default_prompt_name=None if adapters else "a", heads=Heads(multi_vector=None if adapters else roles),
    )  # fmt: skip
    anything: Any = SimpleNamespace(admissions=[None])
    resolve = ModelHandle(config, model, anything, anything, anything, anything).resolve_options
    assert [resolve(is_query=is_query) for is_query in (None, True, False)[: len(expected)]] == expected
    assert resolve(prompt_name="a", is_query=True)[0] == resolve("a" if adapters else None, "a")[0] == "a: "
