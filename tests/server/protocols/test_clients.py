"""Every form of a response has the vectors that the engine computes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from embert import engine
from tests.server.live import Live

if TYPE_CHECKING:
    import openai

Floats = npt.NDArray[np.float32]

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
TEXTS = [
    "Hello, world",
    "a",
    "Ångström façade naïve 👩‍🚀 — 東京は日本の首都です。",
    "def f(x: int) -> str:\n\treturn f'{x!r:>10}'",
    "The quick brown fox jumps over the lazy dog.",
    "Hello, world",
]
LONG = "very long " * 700


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    import openai  # takes a second and a half, in each of the processes that collect tests

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def rows(response: openai.types.CreateEmbeddingResponse) -> Floats:
    assert [item.index for item in response.data] == list(range(len(response.data)))
    assert all(item.object == "embedding" for item in response.data)
    return np.array([item.embedding for item in response.data], np.float32)


def test_openai_default_is_base64_and_equals_the_engine(client: openai.OpenAI) -> None:
    texts = [*TEXTS, LONG]
    response = client.embeddings.create(model=MODEL, input=texts)
    with engine.Engine.load(device="cpu") as loaded:
        np.testing.assert_allclose(rows(response), loaded.embed(texts), atol=1e-5)
    assert (response.object, response.model) == ("list", MODEL)
    tokens = engine.Tokenizer(engine.load_model()).encode(texts).tokens
    assert (response.usage.prompt_tokens, response.usage.total_tokens) == (tokens, tokens)


def test_all_forms_of_a_response_hold_the_same_bits(http: httpx.Client) -> None:
    raw = {"accept": "application/octet-stream"}
    forms = {
        "tei json": np.array(http.post("/embed", json={"inputs": TEXTS}).json(), np.float32),
        "root": np.array(http.post("/", json={"inputs": TEXTS}).json(), np.float32),
    }
    for path in ("/v1/embeddings", "/embeddings"):
        floats = http.post(path, json={"input": TEXTS}).json()
        forms[f"{path} float"] = np.array([item["embedding"] for item in floats["data"]], np.float32)
        coded = http.post(path, json={"input": TEXTS, "encoding_format": "base64"}).json()
        buffers = [base64.b64decode(item["embedding"]) for item in coded["data"]]
        forms[f"{path} base64"] = np.stack([np.frombuffer(buffer, "<f4") for buffer in buffers])
        assert {**floats, "data": None, "id": ""} == {**coded, "data": None, "id": ""}
    for path, field in (("/v1/embeddings", "input"), ("/embed", "inputs"), ("/", "inputs")):
        response = http.post(path, json={field: TEXTS}, headers=raw)
        assert response.headers["content-type"] == "application/octet-stream"
        assert response.headers["x-embedding-shape"] == f"{len(TEXTS)},384"
        forms[f"{path} raw"] = np.frombuffer(response.content, "<f4").reshape(-1, 384)
    first = forms.pop("tei json")
    assert first.shape == (len(TEXTS), 384)
    for name, form in forms.items():
        assert (form == first).all(), name


def test_embed_all_is_the_last_hidden_state(http: httpx.Client) -> None:
    """The rows of all tokens, special ones included. Their mean is the embedding before it is normalized."""
    hidden = http.post("/embed_all", json={"inputs": TEXTS[:4]}).json()
    embeddings = http.post("/embed", json={"inputs": TEXTS[:4], "normalize": False}).json()
    for vectors, embedding in zip(hidden, embeddings, strict=True):
        assert np.allclose(np.mean(vectors, axis=0), embedding, atol=1e-5)
    assert len(hidden[1]) == 3  # [CLS] a [SEP]
