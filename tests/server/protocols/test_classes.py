"""The routes that classify: responses of a model of three labels, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.server.live import Live
from tests.server.protocols.oracle import Floats, logits_of, sigmoid, softmax
from tests.server.refusals import check_refused

LABELS = ("negative", "neutral", "positive")
TEXTS: list[tuple[str, ...]] = [
    ("I like it",), ("a cat", "a kitten"), ("I do not",), ("word " * 300,), ("dogs", "word " * 300), ("naïve", "x"),
]  # fmt: skip
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def client(classifier: Live) -> Iterator[httpx.Client]:
    with classifier.client() as opened:
        yield opened


@pytest.fixture(scope="module")
def logits(classifier: Live) -> Floats:
    """HuggingFace's logits of the texts and pairs."""
    return logits_of(classifier, TEXTS)


def check_labels(rows: list[dict[str, Any]], expected: Floats, *, of: int = 3) -> None:
    """All labels of one text with their scores, best first."""
    order = np.argsort(-expected)[:of]
    assert [row["label"] for row in rows] == [LABELS[index] for index in order]
    assert np.allclose([row["score"] for row in rows], expected[order], rtol=0, atol=TOLERANCE)


# --- /predict ---


def test_texts_and_pairs_together(client: httpx.Client, logits: Floats) -> None:
    response = client.post("/predict", json={"inputs": TEXTS})
    for rows, expected in zip(response.json(), softmax(logits), strict=True):
        check_labels(rows, expected)
    assert response.headers["x-truncated-texts"] == "2"
    assert int(response.headers["x-compute-characters"]) == sum(len(text) for texts in TEXTS for text in texts)
    raw = client.post("/predict", json={"inputs": TEXTS, "raw_scores": True}).json()
    for rows, expected in zip(raw, logits, strict=True):
        check_labels(rows, expected)


def test_one_text_or_pair_gets_one_list(client: httpx.Client, logits: Floats) -> None:
    expected = softmax(logits)
    check_labels(client.post("/predict", json={"inputs": "I like it"}).json(), expected[0])
    check_labels(client.post("/predict", json={"inputs": ["I like it"]}).json(), expected[0])
    check_labels(client.post("/predict", json={"inputs": ["a cat", "a kitten"]}).json(), expected[1])
    (rows,) = client.post("/predict", json={"inputs": [["a cat", "a kitten"]]}).json()
    check_labels(rows, expected[1])


def test_what_huggingface_hub_sends(client: httpx.Client, logits: Floats) -> None:
    (rows,) = client.post("/predict", json={"inputs": "I like it", "parameters": {}}).json()
    check_labels(rows, softmax(logits)[0])
    for name, function in (("none", lambda x: x), ("sigmoid", sigmoid), ("softmax", softmax)):
        parameters = {"function_to_apply": name, "top_k": 2}
        (rows,) = client.post("/predict", json={"inputs": "I like it", "parameters": parameters}).json()
        check_labels(rows, function(logits[0]), of=2)


def test_one_label_has_a_sigmoid(reranker: Live) -> None:
    (logit,) = logits_of(reranker, [("a cat",)])[0]
    (row,) = reranker.post("/predict", {"inputs": "a cat"}).json()
    assert row["label"] == "relevance"
    assert abs(row["score"] - sigmoid(logit)) < TOLERANCE


@pytest.mark.parametrize("direction", ["right", "left"])
def test_what_is_cut(client: httpx.Client, classifier: Live, direction: str) -> None:
    text = " ".join(f"word{i} {i}" for i in range(200))
    body = {"inputs": text, "truncation_direction": direction.upper(), "raw_scores": True}
    check_labels(client.post("/predict", json=body).json(), logits_of(classifier, [(text,)], side=direction)[0])
    both = client.post("/predict", json=body | {"inputs": [["a", "b"], [text]], "truncate": False})
    check_refused(both, 422, ["`inputs`: text 1 has "])


# --- /classify ---


def test_classify(client: httpx.Client, logits: Floats) -> None:
    chosen = [0, 2, 3]
    texts = [TEXTS[index][0] for index in chosen]
    response = client.post("/classify", json={"model": "classifier", "input": texts})
    content = response.json()
    assert list(content) == ["id", "object", "created", "model", "data", "usage"]
    for index, (row, expected) in enumerate(zip(content["data"], softmax(logits[chosen]), strict=True)):
        assert (row["index"], row["num_classes"]) == (index, 3)
        assert np.allclose(row["probs"], expected, rtol=0, atol=TOLERANCE)
        assert row["label"] == LABELS[expected.argmax()]
    tokens = int(response.headers["x-compute-tokens"])
    assert content["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    raw = client.post("/classify", json={"input": texts[0], "use_activation": False}).json()["data"]
    assert np.allclose([row["probs"] for row in raw], logits[:1], rtol=0, atol=TOLERANCE)
    options = {"truncate_prompt_tokens": 4, "truncation_side": "left", "use_activation": False}
    (cut,) = client.post("/classify", json={"input": "one two three four", **options}).json()["data"]
    (short,) = client.post("/classify", json={"input": "three four", "use_activation": False}).json()["data"]
    assert cut == short


# --- what is refused ---

REFUSED: list[tuple[str, dict[str, Any], int, tuple[str, ...]]] = [
    ("/predict", {}, 422, ("`inputs`",)),
    ("/predict", {"inputs": []}, 400, ("`inputs`",)),
    ("/predict", {"inputs": [["a"], [""]]}, 400, ("`inputs[1][0]`",)),
    ("/predict", {"inputs": [["a"], []]}, 400, ("`inputs[1]`",)),
    ("/predict", {"inputs": ["a", "b", "c"]}, 422, ("`inputs`", "3")),
    ("/predict", {"inputs": [["a"], ["a", "b", "c"]]}, 422, ("`inputs[1]`", "3")),
    ("/predict", {"inputs": [["a"], "b"]}, 422, ("`inputs[1]` is a string",)),
    ("/predict", {"inputs": [["a", 1]]}, 422, ("`inputs[0][1]` is 1",)),
    ("/predict", {"inputs": [["a"]] * 2049}, 413, ("`inputs`", "2049", "2048")),
    ("/predict", {"inputs": "a", "parameters": {"top_k": 0}}, 422, ("`parameters.top_k`",)),
    ("/predict", {"inputs": "a", "parameters": {"function_to_apply": "x"}}, 422, ("`parameters.function_to_apply`",)),
    ("/classify", {}, 422, ("`input`",)),
    ("/classify", {"input": ["a", ""]}, 400, ("`input[1]`",)),
    ("/classify", {"input": [1, 2]}, 422, ("`input[0]` is 1",)),
    ("/classify", {"input": "a", "model": "gpt-4"}, 404, ("`model`", "classifier", "'gpt-4'")),
    ("/classify", {"input": "a", "truncate_prompt_tokens": 2}, 422, ("`truncate_prompt_tokens`",)),
]


@pytest.mark.parametrize(("path", "body", "status", "says"), REFUSED, ids=lambda each: str(each)[:50])
def test_refused(client: httpx.Client, path: str, body: dict[str, Any], status: int, says: tuple[str, ...]) -> None:
    check_refused(client.post(path, json=body), status, says)
