"""/token_classify, /zero_shot and `POST /` of their models, compared with transformers' pipelines, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import transformers

from tests.oracles.pipelines import LABELS, random_texts, write
from tests.server.live import MAX_WEIGHTS, Live, live
from tests.server.protocols.oracle import model_folder, softmax
from tests.server.refusals import check_refused

LABELED = ["animals", "taxes", "東京"]


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write(tmp_path_factory.mktemp("tagger"), "cased", "bert", "ForTokenClassification", LABELS)
    with live(str(folder), "--device", "cpu", constants={MAX_WEIGHTS: 20_000}) as running:
        yield running


def pipeline(task: str, server: Live) -> Any:
    kind: Any = task
    made = transformers.pipeline(kind, model_folder(server), device="cpu")
    made.tokenizer.model_max_length = min(made.tokenizer.model_max_length, made.model.config.max_position_embeddings)
    return made


def close(response: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """True if the entities and the order of their fields are the same, and scores equal to 1e-4."""
    found, wanted = ([entity.pop("score") for entity in entities] for entities in (response, expected))
    names = [[[*entity] for entity in entities] for entities in (response, expected)]
    return response == expected and names[0] == names[1] and np.allclose(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("path", ["/token_classify", "/"])
def test_entities_are_those_of_the_pipeline(tagger: Live, path: str) -> None:
    oracle, texts = pipeline("token-classification", tagger), random_texts(12)
    for parameters in ({}, {"aggregation_strategy": "simple"}, {"aggregation_strategy": "AVERAGE", "stride": 5}):
        body = {"inputs": texts, "parameters": parameters}
        for found, expected in zip(tagger.post(path, body).json(), oracle(texts, **parameters), strict=True):
            assert close(found, expected)
    alone = tagger.post(path, {"inputs": texts[1], "aggregation_strategy": "simple", "ignore_labels": []}).json()
    assert close(alone, oracle(texts[1], aggregation_strategy="simple", ignore_labels=[]))
    assert tagger.post(path, {"inputs": " "}).json() == []


@pytest.mark.parametrize("path", ["/token_classify", "/"])
def test_hugging_faces_javascript_gets_groups_unless_it_asks_otherwise(tagger: Live, path: str) -> None:
    body = {"inputs": "Angela met Merkel in New York"}
    agent = {"user-agent": "@huggingface/inference/4.13.30 node.js/20"}
    groups = tagger.post(path, {**body, "aggregation_strategy": "simple"}).json()
    assert tagger.post(path, body, headers=agent).json() == groups
    asks = {**body, "parameters": {"aggregation_strategy": "none"}}
    assert tagger.post(path, asks, headers=agent).json() == tagger.post(path, body).json() != groups


def test_long_text_with_a_stride_is_not_cut(tagger: Live) -> None:
    text = "met in New York " * 60
    cut = tagger.post("/token_classify", {"inputs": text})
    whole = tagger.post("/token_classify", {"inputs": text, "stride": 8, "aggregation_strategy": "simple"})
    assert cut.headers["x-truncated-texts"] == "1"
    assert "x-truncated-texts" not in whole.headers
    for direction in ("right", "left"):  # what is cut off does not count for MAX_RESPONSE_WEIGHTS
        many = tagger.post("/token_classify", {"inputs": [text] * 60, "truncation_direction": direction})
        assert (many.status_code, many.headers["x-truncated-texts"]) == (200, "60")
    assert int(whole.headers["x-compute-tokens"]) > 240
    assert tagger.post("/token_classify", {"inputs": text, "truncate": False}).status_code == 422


def test_pooling_returns_the_scores_of_tokens(tagger: Live) -> None:
    for extra in ({}, {"task": "token_classify"}):
        (found,) = tagger.post("/pooling", {"input": "Angela met Merkel", **extra}).json()["data"]
        raw = tagger.post("/pooling", {"input": "Angela met Merkel", "use_activation": False, **extra}).json()
        scores = np.array(found["data"])
        assert scores.shape == (5, len(LABELS))
        np.testing.assert_allclose(scores, softmax(np.array(raw["data"][0]["data"])), atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param", "named"),
    [
        ({"inputs": []}, "inputs", "empty"),
        ({"inputs": 5}, "inputs", "5"),
        ({"inputs": "a", "stride": 46, "aggregation_strategy": "max"}, "stride", "from 0 to 45"),
        ({"inputs": "a", "stride": -1, "aggregation_strategy": "max"}, "stride", "-1"),
        ({"inputs": "a", "stride": 3}, "aggregation_strategy", "none"),
        ({"inputs": "a", "aggregation_strategy": "most"}, "aggregation_strategy", "most"),
        ({"inputs": "a", "parameters": {"ignore_labels": "O"}}, "ignore_labels", "a string"),
        ({"inputs": "New " * 400, "stride": 44, "aggregation_strategy": "max"}, "inputs", "20000"),
    ],
)
def test_refused_requests_for_entities(tagger: Live, body: dict[str, Any], param: str, named: str) -> None:
    response = tagger.post("/token_classify", body)
    assert response.status_code in (400, 413, 422), response.text
    assert f"`{param}" in response.json()["error"]
    assert named in response.json()["error"]


@pytest.mark.parametrize("path", ["/zero_shot", "/"])
def test_zero_shot_classes_are_those_of_the_pipeline(nli: Live, path: str) -> None:
    oracle, texts = pipeline("zero-shot-classification", nli), random_texts(8)
    for parameters in ({}, {"multi_label": True}, {"hypothesis_template": "It is about {}, {{that}}!"}):
        options = {"candidate_labels": LABELED, **parameters}
        responses = nli.post(path, {"inputs": texts, "parameters": options}).json()
        for found, expected in zip(responses, oracle(texts, **options), strict=True):
            assert (found["sequence"], found["labels"]) == (expected["sequence"], expected["labels"])
            np.testing.assert_allclose(found["scores"], expected["scores"], atol=1e-4)
    (one,) = nli.post(path, {"inputs": texts[:1], "candidate_labels": "animals, taxes"}).json()
    alone = nli.post(path, {"inputs": texts[0], "candidate_labels": ["animals", "taxes"]}).json()
    assert one == alone
    assert sorted(alone["labels"]) == ["animals", "taxes"]


def test_huggingface_hub_reads_a_list_of_labels(nli: Live) -> None:
    body = {"inputs": "a cat", "parameters": {"candidate_labels": LABELED}}
    response = nli.post("/", body, headers={"user-agent": "unknown/None; hf_hub/1.33.0"}).json()
    assert [*response[0]] == ["label", "score"]
    assert sorted(each["label"] for each in response) == sorted(LABELED)


def test_long_labels_of_many_texts_have_a_limit(nli: Live) -> None:
    """A body of 1 MB would have a response of 500 MB: a label of spaces has one token."""
    response = nli.post("/zero_shot", {"inputs": ["a"] * 500, "candidate_labels": ["a" + " " * 500_000] * 2})
    check_refused(response, 413, ["would have about"])


def test_long_words_of_many_sequences_have_a_limit(tagger: Live) -> None:
    text = " ".join(["q" * 30_000] * 110)  # each is one token that the vocabulary lacks
    body = {"inputs": text, "aggregation_strategy": "simple", "stride": 45}
    check_refused(tagger.post("/token_classify", body), 413, ["would have about"])


def test_body_without_labels_is_of_predict(nli: Live) -> None:
    for text in ('what is "candidate_labels"?', '"candidate_labels": 1', "candidate_labels"):
        (response,) = nli.post("/", {"inputs": [[text]]}).json()
        assert {each["label"] for each in response} == {"contradiction", "neutral", "entailment"}


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"candidate_labels": []}, "candidate_labels", "at least one"),
        ({"candidate_labels": " , "}, "candidate_labels", "at least one"),
        ({}, "candidate_labels", "required"),
        ({"candidate_labels": ["a"] * 1001}, "candidate_labels", "limit is 1000"),
        ({"candidate_labels": ["a", ""]}, "candidate_labels[1]", "empty"),
        ({"inputs": ["a"] * 11, "candidate_labels": ["a"] * 1000}, "candidate_labels", "1000 labels and 11 texts"),
        ({"candidate_labels": "a," * 1_000_000}, "candidate_labels", "has 1000001 labels; the limit is 1000"),
        ({"candidate_labels": ["a"], "hypothesis_template": "{}{}"}, "hypothesis_template", "once"),
        ({"candidate_labels": ["a"], "hypothesis_template": "{{" * 50_000 + "{}"}, "hypothesis_template", "65536"),
        ({"candidate_labels": ["a"], "hypothesis_template": "none"}, "hypothesis_template", "'none'"),
        ({"candidate_labels": ["a"], "hypothesis_template": "{:9999999}"}, "hypothesis_template", "9999999"),
        ({"candidate_labels": ["long " * 150]}, "candidate_labels", "the limit is"),
        ({"candidate_labels": ["a"] * 999, "hypothesis_template": "{}" + "x" * 10_100}, "hypothesis_template", "limit"),
        ({"candidate_labels": ["a"], "multi_label": "so"}, "multi_label", "a string"),
    ],
)
def test_refused_zero_shot_requests(nli: Live, fields: dict[str, Any], param: str, named: str) -> None:
    response = nli.post("/zero_shot", {"inputs": "a text", **fields})
    assert response.status_code in (413, 422), response.text
    assert f"`{param}`" in response.json()["error"]
    assert named in response.json()["error"]


def test_models_without_the_task(nli: Live, tagger: Live, classifier: Live) -> None:
    body = {"inputs": "a", "candidate_labels": ["b"]}
    for server, path, task in (
        (tagger, "/zero_shot", "zero_shot"),
        (classifier, "/zero_shot", "zero_shot"),
        (classifier, "/", "zero_shot"),
        (nli, "/token_classify", "token_classify"),
    ):
        check_refused(server.post(path, body), 424, [f"does not have the task {task}"])
