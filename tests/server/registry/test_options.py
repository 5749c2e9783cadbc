"""Options of a request, and the defaults of the server: truncation, prompts, dimensions, tokens.

The stand-in's vectors depend only on the ids, so they tell which ids the server made of a text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from embert import engine
from tests.server.live import STAND_IN, Live, live
from tests.server.models import copy_model, edit_json
from tests.server.stand_in import expected

PROMPTS = {"query": "find: ", "document": "", "long": "a b c d "}
LONG = " ".join(f"w{i}" for i in range(400))


@pytest.fixture(scope="module")
def tokenizer() -> engine.Tokenizer:
    return engine.Tokenizer(engine.load_model())


@pytest.fixture(scope="module")
def prompted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copy_model(tmp_path_factory.mktemp("prompted"))
    edit_json(folder / "config_sentence_transformers.json", prompts=PROMPTS, default_prompt_name=None)
    return folder


@pytest.fixture(scope="module")
def prompted(prompted_model: Path) -> Iterator[Live]:
    options = ("--default-prompt-name", "query", "--no-auto-truncate", "--openai-accepts", "token-ids")
    with live(str(prompted_model), *STAND_IN, *options, "--served-model-name", "cats:latest") as running:
        yield running


@pytest.fixture(scope="module")
def client(prompted: Live) -> Iterator[httpx.Client]:
    with prompted.client() as client:
        yield client


def whole(tokenizer: engine.Tokenizer, text: str) -> list[int]:
    """All ids of a text, however long, with [CLS] and [SEP]."""
    return [token.id for token in tokenizer.tokenize([text])[0]]


def same(response: httpx.Response, ids: list[int]) -> None:
    assert response.status_code == 200, response.text
    body = response.json()
    vectors = [item["embedding"] for item in body["data"]] if isinstance(body, dict) else body
    assert np.allclose(vectors, [expected(ids)], atol=1e-6)


# --- prompts ---


@pytest.mark.parametrize(
    ("options", "prompt"),
    [({}, "find: "), ({"prompt_name": None}, "find: "), ({"prompt_name": "query"}, "find: "),
     ({"prompt_name": "long"}, "a b c d "), ({"prompt_name": "document"}, "")],
)  # fmt: skip
def test_prompt(client: httpx.Client, tokenizer: engine.Tokenizer, options: dict[str, Any], prompt: str) -> None:
    ids = whole(tokenizer, f"{prompt}a text")
    same(client.post("/embed", json={"inputs": "a text", **options}), ids)
    same(client.post("/v1/embeddings", json={"input": "a text", **options}), ids)
    assert len(client.post("/embed_all", json={"inputs": "a text", **options}).json()[0]) == len(ids)
    body = {"inputs": {"source_sentence": "a text", "sentences": ["more"]}, "parameters": options}
    other = expected(whole(tokenizer, f"{prompt}more"))
    assert np.allclose(client.post("/similarity", json=body).json(), [expected(ids) @ other], atol=1e-6)


def test_prompts_that_are_refused(client: httpx.Client) -> None:
    response = client.post("/v1/embeddings", json={"input": "a", "prompt_name": "passage"})
    assert (response.status_code, response.json()["error"]["param"]) == (422, "prompt_name")
    assert all(value in response.text for value in ("document", "long", "query", "'passage'"))
    assert client.get("/info").json()["prompts"] == ["document", "long", "query"]
    same(client.post("/embed", json={"inputs": [101, 5, 102]}), [101, 5, 102])  # ids have no prompt
    assert client.post("/embed", json={"inputs": [101], "prompt_name": "query"}).status_code == 422
    for input_type in ("qurey", 3):
        refused = client.post("/v1/embeddings", json={"input": "a", "input_type": input_type})
        assert (refused.status_code, refused.json()["error"]["param"]) == (422, "input_type")


def test_tokenize_takes_a_prompt_when_asked(client: httpx.Client, tokenizer: engine.Tokenizer) -> None:
    plain = client.post("/tokenize", json={"inputs": "a text"}).json()[0]
    assert [token["id"] for token in plain] == whole(tokenizer, "a text")
    prompted = client.post("/tokenize", json={"inputs": "a text", "prompt_name": "query"}).json()[0]
    assert [token["id"] for token in prompted] == whole(tokenizer, "find: a text")


@pytest.mark.parametrize(
    ("input_type", "prompt"),
    [("query", "find: "), ("search_query", "find: "), ("document", ""), ("passage", ""), ("long", "a b c d "),
     ("clustering", "find: ")],
)  # fmt: skip
def test_input_type_chooses_a_prompt(
    client: httpx.Client, tokenizer: engine.Tokenizer, input_type: str, prompt: str
) -> None:
    """The server's default prompt stays if the model has none of that kind."""
    same(client.post("/v1/embeddings", json={"input": "a text", "input_type": input_type}),
         whole(tokenizer, f"{prompt}a text"))  # fmt: skip
    named = {"input": "a text", "input_type": input_type, "prompt_name": "long"}
    same(client.post("/v1/embeddings", json=named), whole(tokenizer, "a b c d a text"))
    model = client.get("/v1/models").json()["data"][0]["id"]
    ids = {"input": [101, 5, 102], "input_type": input_type, "model": model}
    same(client.post("/v1/embeddings", json=ids), [101, 5, 102])


# --- truncation ---


def cut(ids: list[int], direction: str) -> list[int]:
    """256 tokens, [CLS] and [SEP] among them."""
    body = ids[1:-1]
    return [ids[0], *(body[:254] if direction == "right" else body[-254:]), ids[-1]]


@pytest.mark.parametrize("direction", ["right", "RIGHT", "Left"])
def test_truncation_direction(client: httpx.Client, tokenizer: engine.Tokenizer, direction: str) -> None:
    ids = cut(whole(tokenizer, LONG), direction.lower())
    options = {"truncate": True, "truncation_direction": direction, "prompt_name": "document"}
    same(client.post("/embed", json={"inputs": LONG, **options}), ids)
    body = {"inputs": {"source_sentence": LONG, "sentences": [LONG]}, "parameters": options}
    assert np.allclose(client.post("/similarity", json=body).json(), [1], atol=1e-6)
    assert len(client.post("/embed_all", json={"inputs": LONG, **options}).json()[0]) == 256
    # The prompt is kept when the text is cut on the right.
    same(
        client.post("/embed", json={"inputs": LONG, "truncate": True}), cut(whole(tokenizer, f"find: {LONG}"), "right")
    )


def test_ids_are_cut_as_they_are(client: httpx.Client) -> None:
    ids = list(range(1000, 1300))
    same(client.post("/embed", json={"inputs": ids, "truncate": True}), ids[:256])
    same(client.post("/embed", json={"inputs": ids, "truncate": True, "truncation_direction": "left"}), ids[-256:])
    named = {"model": client.get("/info").json()["served_model_name"]}
    same(client.post("/v1/embeddings", json={"input": [ids], "truncate": True, **named}), ids[:256])


def test_no_auto_truncate_is_the_default_of_requests(client: httpx.Client, http: httpx.Client) -> None:
    for options in ({}, {"truncate": None}, {"truncate": False}):
        assert client.post("/embed", json={"inputs": LONG, **options}).status_code == 422
        assert client.post("/v1/embeddings", json={"input": LONG, **options}).status_code == 422
    for options in ({}, {"truncate": None}, {"truncate": True}):  # a server with default options
        assert http.post("/embed", json={"inputs": LONG, **options}).headers["x-compute-tokens"] == "256"
    assert client.get("/info").json()["auto_truncate"] is False
    assert http.get("/info").json()["auto_truncate"] is True


def test_ollamas_routes_cut_texts_and_take_a_name_with_the_tag_or_without(client: httpx.Client) -> None:
    model_id = client.get("/info").json()["model_id"]
    for name in ("cats", "cats:latest", model_id, f"{model_id}:latest"):
        for path in ("/api/embed", "/models/cats:latest/api/embed"):
            response = client.post(path, json={"input": [LONG], "model": name}).json()
            assert (response["model"], np.shape(response["embeddings"])) == ("cats:latest", (1, 384))
    assert client.get("/api/tags").json()["models"][0]["name"] == "cats:latest"
    assert client.post("/v1/embeddings", json={"input": "a", "model": "cats"}).status_code == 404


# --- dimensions and normalize, with the real model ---


def test_normalize_and_dimensions(http: httpx.Client) -> None:
    def embed(**options: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array(http.post("/embed", json={"inputs": ["Hello, world", "a"], **options}).json())

    raw = embed(normalize=False)
    assert (np.linalg.norm(raw, axis=1) > 1.5).all()
    for dimensions in (10, 384):
        cut = raw[:, :dimensions]
        assert np.allclose(embed(normalize=False, dimensions=dimensions), cut, atol=1e-6)
        unit = cut / np.linalg.norm(cut, axis=1, keepdims=True)
        assert np.allclose(embed(dimensions=dimensions), unit, atol=1e-6)
    assert (embed(dimensions=384) == embed()).all()


# --- similarity, tokenize, decode ---


def test_tokenize(http: httpx.Client) -> None:
    text = "Ünïcode 👩‍🚀 tokenization"
    first, second = http.post("/tokenize", json={"inputs": [text, ""]}).json()
    assert [sorted(token) for token in first] == [["id", "special", "start", "stop", "text"]] * len(first)
    assert first[0] == {"id": 101, "text": "[CLS]", "special": True, "start": None, "stop": None}
    assert first[-1] == {"id": 102, "text": "[SEP]", "special": True, "start": None, "stop": None}
    for token in first[1:-1]:
        assert token["text"] == text[token["start"] : token["stop"]]  # characters, not bytes
    assert [token["id"] for token in second] == [101, 102]
    bare = http.post("/tokenize", json={"inputs": text, "add_special_tokens": False}).json()[0]
    assert bare == first[1:-1]


def test_decode(http: httpx.Client) -> None:
    ids = [token["id"] for token in http.post("/tokenize", json={"inputs": "hello, world"}).json()[0]]
    assert http.post("/decode", json={"ids": ids}).json() == ["hello, world"]
    assert http.post("/decode", json={"ids": [ids, ids[1:3]]}).json() == ["hello, world", "hello,"]
    kept = http.post("/decode", json={"ids": ids, "skip_special_tokens": False}).json()
    assert kept == ["[CLS] hello, world [SEP]"]


def test_vllms_tokenizer(http: httpx.Client) -> None:
    text = "hello, worlds"
    ids = [token["id"] for token in http.post("/tokenize", json={"inputs": text}).json()[0]]
    body = {"prompt": text, "model": "text-embeddings-inference"}
    response = http.post("/tokenize", json=body).json()
    assert response == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}
    words = http.post("/tokenize", json={**body, "return_token_strs": True}).json()["token_strs"]
    assert words == ["[CLS]", "hello", ",", "worlds", "[SEP]"]
    bare = http.post("/tokenize", json={**body, "add_special_tokens": False}).json()
    assert bare["tokens"] == ids[1:-1]
    assert http.post("/detokenize", json={"tokens": bare["tokens"]}).json() == {"prompt": text}
    for path, wrong, status in (
        ("/detokenize", {"tokens": ids, "model": "gpt"}, 404),
        ("/detokenize", {"tokens": [2**40]}, 422),
        ("/detokenize", {"tokens": []}, 400),
        ("/tokenize", {"prompt": text, "model": "gpt"}, 404),
        ("/tokenize", {"messages": []}, 422),
    ):
        assert http.post(path, json=wrong).status_code == status, wrong


# --- operations ---


def test_info(http: httpx.Client) -> None:
    """Values that depend on the machine. docs/api.md has the others."""
    info = http.get("/info").json()
    assert (info["model_dtype"], info["backend"], info["device"]) == ("float32", "cpu", "cpu")
    assert info["max_queue_tokens"] == info["max_concurrent_requests"] == 256 * info["max_batch_tokens"]
    assert info["tokenization_workers"] >= 1
    for path in ("/health", "/ping", "/livez"):
        assert http.get(path).json()["status"] == "ok"
