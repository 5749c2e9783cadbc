"""openai: three kinds of vectors of one forward."""

from __future__ import annotations

import httpx
import numpy as np

from tests.clients.conftest import Fleet, Page
from tests.clients.oracles import assert_embedded


def test_the_page(page: Page, fleet: Fleet) -> None:
    found = page("openai")
    text = "Cats purr when they are content."
    assert_embedded([found["dense"]], fleet.folder("bge-m3"), [text])
    weights = found["weights"]
    with httpx.Client(base_url=fleet.url("bge-m3"), timeout=60) as client:
        (sparse,) = client.post("/embed_sparse", json={"inputs": text}).json()
        (ids,) = client.post("/tokenize", json={"inputs": text}).json()
    assert [(each["index"], each["value"]) for each in sparse] == list(
        zip(weights["indices"], weights["values"], strict=True)
    )
    tokens = np.array(found["tokens"])
    assert tokens.shape == (len(ids) - 1, 64)  # without the first token, as FlagEmbedding
    np.testing.assert_allclose(np.linalg.norm(tokens, axis=1), 1, atol=1e-5)
