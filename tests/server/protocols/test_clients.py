"""Client libraries get the vectors that transformers computes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from huggingface_hub import InferenceClient

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


class Oracle:
    """transformers in float32: its tokenizer, its model, mean pooling, length 1."""

    def __init__(self) -> None:
        folder = engine.load_model().folder
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, truncation=True, max_length=256)["input_ids"]
        return found

    def hidden(self, ids: list[int]) -> Floats:
        with torch.inference_mode():
            response: Floats = self.model(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()
        return response

    def embed(self, texts: list[str]) -> Floats:
        rows = np.stack([self.hidden(self.ids(text)).mean(0) for text in texts])
        unit: Floats = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return unit


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    import openai  # takes a second and a half, in each of the processes that collect tests

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def hub(server: Live) -> InferenceClient:
    return InferenceClient(server.url)


def cosines(a: npt.ArrayLike, b: npt.ArrayLike) -> Floats:
    left, right = np.asarray(a, np.float64), np.asarray(b, np.float64)
    found: Floats = np.sum(left * right, 1) / (np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1))
    return found


def rows(response: openai.types.CreateEmbeddingResponse) -> Floats:
    assert [item.index for item in response.data] == list(range(len(response.data)))
    assert all(item.object == "embedding" for item in response.data)
    return np.array([item.embedding for item in response.data], np.float32)


# --- openai ---


def test_openai_default_is_base64_and_equals_transformers(client: openai.OpenAI, oracle: Oracle) -> None:
    texts = [*TEXTS, LONG]
    response = client.embeddings.create(model=MODEL, input=texts)
    vectors = rows(response)
    assert cosines(vectors, oracle.embed(texts)).min() >= 0.999999
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert (response.object, response.model) == ("list", MODEL)
    tokens = sum(len(oracle.ids(text)) for text in texts)
    assert (response.usage.prompt_tokens, response.usage.total_tokens) == (tokens, tokens)


def test_openai_models(client: openai.OpenAI) -> None:
    assert [(model.id, model.object) for model in client.models.list()] == [(MODEL, "model")]
    card = client.models.retrieve(MODEL)
    assert (card.id, card.owned_by) == (MODEL, "embert")
    from openai import NotFoundError

    with pytest.raises(NotFoundError):
        client.models.retrieve("text-embedding-3-small")


# --- huggingface_hub ---


def test_hub_feature_extraction(hub: InferenceClient, oracle: Oracle) -> None:
    vectors = hub.feature_extraction(TEXTS, normalize=False, truncate=True, truncation_direction="right")
    assert vectors.shape == (len(TEXTS), 384)
    assert (np.linalg.norm(vectors, axis=1) > 1.5).all()
    assert cosines(vectors, oracle.embed(TEXTS)).min() >= 0.999999


# --- every form of the same response ---


def test_all_forms_of_an_response_hold_the_same_bits(http: httpx.Client) -> None:
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


def test_embed_all_is_the_last_hidden_state(http: httpx.Client, oracle: Oracle) -> None:
    response = http.post("/embed_all", json={"inputs": TEXTS[:4]}).json()
    for text, vectors in zip(TEXTS[:4], response, strict=True):
        hidden = oracle.hidden(oracle.ids(text))  # special tokens included, not normalized
        assert np.shape(vectors) == hidden.shape
        assert np.allclose(vectors, hidden, atol=1e-4)
