"""Ollama's own client, and the embeddings of langchain and llama-index for it."""

from __future__ import annotations

import asyncio

import numpy as np
import ollama
import pytest
from langchain_ollama import OllamaEmbeddings

from tests.clients.conftest import Fleet, Page
from tests.clients.oracles import assert_embedded

TEXTS = ["a cat", "a kitten"]


def test_the_page(page: Page, fleet: Fleet) -> None:
    found, folder = page("ollama"), fleet.folder("minilm")
    assert_embedded(found["response"].embeddings, folder, TEXTS)
    assert found["response"].total_duration > 0
    for vectors in (
        found["by_langchain"].embed_documents(TEXTS),
        asyncio.run(found["by_langchain"].aembed_documents(TEXTS)),
        found["by_llama_index"].get_text_embedding_batch(TEXTS),
        [found["by_llama_index"].get_query_embedding(text) for text in TEXTS],
    ):
        assert_embedded(vectors, folder, TEXTS)


def test_ollamas_client(fleet: Fleet) -> None:
    client, folder = ollama.Client(host=fleet.url("minilm")), fleet.folder("minilm")
    (listed,) = client.list().models
    assert listed.model == "minilm:latest"
    shown = client.show(listed.model)
    assert shown.capabilities == ["embedding"]
    assert shown.details.family == listed.details.family
    short = client.embed(listed.model, TEXTS, truncate=False, dimensions=8, keep_alive="5m", options={"num_ctx": 512})
    assert [len(vector) for vector in short.embeddings] == [8, 8]
    earlier = np.array(client.embeddings("minilm", "a cat").embedding)
    assert_embedded([earlier / np.linalg.norm(earlier)], folder, ["a cat"])
    with pytest.raises(ollama.ResponseError, match="not found") as unknown:
        client.embed("nomic-embed-text", "a cat")
    assert unknown.value.status_code == 404
    assert_embedded(
        asyncio.run(ollama.AsyncClient(host=fleet.url("minilm")).embed("minilm", TEXTS)).embeddings, folder, TEXTS
    )


def test_langchain_misses_a_model_that_is_not_served(fleet: Fleet) -> None:
    with pytest.raises(ValueError, match="minilm:latest"):
        OllamaEmbeddings(model="mxbai", base_url=fleet.url("minilm"), validate_model_on_init=True)
