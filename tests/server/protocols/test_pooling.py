"""vLLM's `/pooling`, as its clients read it."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from tests.server.live import Live
from tests.server.refusals import check_refused
from tests.server.stand_in import token_vectors

Floats = npt.NDArray[np.float32]

TEXTS = ["Hello, world", "a"]


def ask(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/pooling", json={"input": TEXTS, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def arrays(response: dict[str, Any]) -> list[Floats]:
    return [np.array(item["data"], np.float32) for item in response["data"]]


def test_embed_is_the_default_of_a_model_that_embeds(http: httpx.Client) -> None:
    response = ask(http, model="text-embeddings-inference", user="somebody", priority=0, truncate_prompt_tokens=-1)
    assert list(response) == ["id", "object", "created", "model", "data", "usage"]
    assert response["id"].startswith("pool-")
    assert response["model"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert response["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    assert [list(item) for item in response["data"]] == [["index", "object", "data"]] * 2
    for body, options in (({}, {}), ({"use_activation": False}, {"normalize": False}), ({"dimensions": 5},) * 2):
        embedded = http.post("/embed", json={"inputs": TEXTS, **options}).json()
        assert (np.array(arrays(ask(http, task="embed", **body))) == np.array(embedded, np.float32)).all()


def test_token_embed_of_hidden_states_is_of_length_1(http: httpx.Client) -> None:
    raw = ask(http, task="token_embed", use_activation=False)
    hidden = [np.array(rows, np.float32) for rows in http.post("/embed_all", json={"inputs": TEXTS}).json()]
    for found, unit, expected in zip(arrays(raw), arrays(ask(http, task="token_embed")), hidden, strict=True):
        assert (found == expected).all()
        assert np.allclose(unit, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize("task", ["embed", "token_embed"])
@pytest.mark.parametrize(("dtype", "read"), [("float32", "<f4"), ("float16", "<f2")])
def test_base64(http: httpx.Client, task: str, dtype: str, read: str) -> None:
    expected = arrays(ask(http, task=task))
    coded = ask(http, task=task, encoding_format="base64", embed_dtype=dtype, endianness="native")
    for item, rows in zip(coded["data"], expected, strict=True):
        assert (np.frombuffer(base64.b64decode(item["data"]), read) == rows.astype(read).ravel()).all()


def test_texts_are_cut_as_asked(http: httpx.Client, late_interaction: Live) -> None:
    response = http.post("/pooling", json={"input": "Hello, world", "truncate_prompt_tokens": 4})
    assert response.headers["x-truncated-texts"] == "1"
    assert response.json()["usage"]["total_tokens"] == 4
    cut = http.post("/embed", json={"inputs": [101, 7592, 1010, 102]}).json()
    assert np.allclose(response.json()["data"][0]["data"], cut[0], atol=1e-6)
    left = {"input": "Hello, world", "truncate_prompt_tokens": 4, "truncation_side": "left", "task": "token_embed"}
    ends = http.post("/embed_all", json={"inputs": [101, 1010, 2088, 102]}).json()
    found = http.post("/pooling", json={**left, "use_activation": False}).json()
    assert np.allclose(found["data"][0]["data"], ends[0], atol=1e-5)
    document = late_interaction.post("/pooling", {"input": "cat a a a", "truncate_prompt_tokens": 5}).json()
    assert np.allclose(document["data"][0]["data"], token_vectors([101, 2, 4937, 1037, 102], 16), atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"task": "plugin"}, 422, ("`task`", "'plugin'")),
        ({"task": "classify"}, 400, ("classify", "embed, tokens")),
        ({"task": "token_embed", "dimensions": 3}, 422, ("`dimensions`", "embed")),
        ({"dimensions": 385}, 422, ("`dimensions`", "1 to 384", "385")),
        ({"truncate_prompt_tokens": 2}, 422, ("`truncate_prompt_tokens`", "3", "2")),
        ({"truncate_prompt_tokens": -2}, 422, ("`truncate_prompt_tokens`", "-1")),
        ({"embed_dtype": "bfloat16"}, 422, ("`embed_dtype`", "'bfloat16'")),
        ({"encoding_format": "bytes"}, 422, ("`encoding_format`", "'bytes'")),
        ({"input": [101, 102]}, 422, ("`input`",)),
        ({"input": ["a", [101]]}, 422, ("`input[1]` is a list of 1",)),
        ({"input": ["a", ""]}, 400, ("`input[1]`",)),
        ({"model": "gpt"}, 404, ("`model`",)),
    ],
    ids=lambda each: str(each)[:50],
)
def test_refused(http: httpx.Client, fields: dict[str, Any], status: int, says: tuple[str, ...]) -> None:
    check_refused(http.post("/pooling", json={"input": "a", **fields}), status, says)


def test_multi_vectors_have_length_1(late_interaction: Live, splade: Live) -> None:
    refused = late_interaction.post("/pooling", {"input": "a", "use_activation": False})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "use_activation")
    check_refused(splade.post("/pooling", {"input": "a"}), 400, ["sparse"])


def test_ids_of_this_models_tokenizer(http: httpx.Client) -> None:
    name = "sentence-transformers/all-MiniLM-L6-v2"
    by_ids = http.post("/pooling", json={"input": [[101, 7592, 1010, 2088, 102], [101, 1037, 102]], "model": name})
    assert np.allclose(arrays(by_ids.json()), arrays(ask(http)), atol=1e-6)
    body = {"input": [101, 102], "model": "text-embeddings-inference"}
    assert http.post("/pooling", json=body).status_code == 422  # a name that says nothing of the tokenizer
