"""Cohere's embeddings: its request, and its response in every type of numbers."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import pytest

from embert.server.protocols.serialization import quantize
from tests.server.refusals import check_refused

TEXTS = ["a cat", "a kitten"]
TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]


def embed(http: httpx.Client, path: str = "/v2/embed", **fields: Any) -> dict[str, Any]:
    response = http.post(path, json={"texts": TEXTS, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_every_type(http: httpx.Client) -> None:
    wanted = np.array(http.post("/embed", json={"inputs": TEXTS}).json(), np.float32)
    found = embed(http, input_type="search_document", embedding_types=TYPES, model="text-embeddings-inference")
    assert list(found) == ["id", "embeddings", "texts", "meta", "response_type"]
    assert found["texts"] == TEXTS
    assert found["meta"] == {"api_version": {"version": "2"}, "tokens": {"input_tokens": 8, "output_tokens": 0}}
    assert found["response_type"] == "embeddings_by_type"
    vectors = found["embeddings"]
    assert list(vectors) == TYPES
    assert np.allclose(vectors["float"], wanted, atol=1e-6)
    exact = np.array(vectors["float"], np.float32)
    for kind in ("int8", "uint8", "binary", "ubinary"):
        assert vectors[kind] == quantize(exact, kind).tolist()
    rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in vectors["base64"]]
    assert np.array_equal(np.array(rows), exact)


def test_the_first_version(http: httpx.Client) -> None:
    plain = embed(http, "/v1/embed")
    assert plain["response_type"] == "embeddings_floats"
    assert plain["meta"]["api_version"] == {"version": "1"}
    assert plain["embeddings"] == embed(http, "/v2/embed")["embeddings"]["float"]
    typed = embed(http, "/v1/embed", embedding_types=["ubinary"])
    assert list(typed["embeddings"]) == ["ubinary"]


def test_inputs_in_place_of_texts(http: httpx.Client) -> None:
    inputs = [{"content": [{"type": "text", "text": text, "image_url": None}]} for text in TEXTS]
    assert embed(http, texts=None, inputs=inputs)["embeddings"] == embed(http)["embeddings"]


def test_options(http: httpx.Client) -> None:
    long = "one two three four five six"
    for cohere, embert in (
        ({"output_dimension": 8}, {"dimensions": 8}),
        ({"max_tokens": 4}, {"truncate_prompt_tokens": 4}),
        ({"max_tokens": 4, "truncate": "START"}, {"truncate_prompt_tokens": 4, "truncation_side": "left"}),
        ({"truncate": "END", "priority": 7, "images": None}, {}),
    ):
        other = http.post("/v1/embeddings", json={"input": [long], **embert}).json()["data"][0]["embedding"]
        assert embed(http, texts=[long], **cohere)["embeddings"]["float"] == [other]


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"texts": None}, 422, ("`texts`", "`inputs`")),
        ({"inputs": []}, 422, ("both",)),
        ({"texts": []}, 400, ("`texts`",)),
        ({"texts": ["a", ""]}, 400, ("`texts[1]`",)),
        ({"texts": ["word " * 400], "truncate": "NONE"}, 422, ("256",)),
        ({"texts": ["a b c d e"], "truncate": "NONE", "max_tokens": 4}, 422, ("limit is 4",)),
        ({"max_tokens": 2}, 422, ("`max_tokens`", "2")),
        ({"truncate": "MIDDLE"}, 422, ("`truncate`",)),
        ({"output_dimension": 1000}, 422, ("`output_dimension`", "1 to 384", "1000")),
        ({"output_dimension": 12, "embedding_types": ["binary"]}, 422, ("`embedding_types`", "binary")),
        ({"embedding_types": []}, 422, ("`embedding_types`",)),
        ({"embedding_types": ["int4"]}, 422, ("`embedding_types[0]`",)),
        ({"input_type": "image"}, 422, ("`input_type`",)),
        ({"texts": None, "inputs": [{"content": []}]}, 422, ("`inputs[0].content`", "0")),
        ({"texts": None, "inputs": [{"content": [{"type": "image_url"}]}]}, 422, ("`inputs[0].content[0].t",)),
        ({"model": "embed-v4.0"}, 404, ("`model`",)),
    ],
    ids=lambda each: str(each)[:50],
)
def test_refused(http: httpx.Client, fields: dict[str, Any], status: int, says: tuple[str, ...]) -> None:
    check_refused(http.post("/v2/embed", json={"texts": TEXTS, **fields}), status, says)
