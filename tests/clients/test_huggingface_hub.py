"""huggingface_hub's InferenceClient at a URL."""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers
from huggingface_hub import InferenceClient

from tests.clients.conftest import Fleet, Page
from tests.clients.models import LABELS
from tests.clients.oracles import assert_embedded

TEXT = "I like this very much."


def test_the_page(page: Page, fleet: Fleet) -> None:
    found = page("huggingface_hub")
    assert_embedded(found["vectors"], fleet.folder("minilm"), ["a cat", "a kitten"])
    kitten, form = found["cosines"]
    assert np.isclose(kitten, found["vectors"][0] @ found["vectors"][1], atol=1e-5)
    assert kitten > form
    pipeline: Any = transformers.pipeline("token-classification", str(fleet.folder("tagger")), device="cpu")
    expected = pipeline(found["text"], aggregation_strategy="simple")
    assert expected
    assert [(each.entity_group, each.start, each.end) for each in found["entities"]] == [
        (each["entity_group"], each["start"], each["end"]) for each in expected
    ]
    pipeline = transformers.pipeline("zero-shot-classification", str(fleet.folder("nli")), device="cpu")
    expected = pipeline(found["text"], ["travel", "sports", "taxes"])
    assert [each.label for each in found["labels"]] == expected["labels"]
    np.testing.assert_allclose([each.score for each in found["labels"]], expected["scores"], atol=1e-5)


def test_options_of_embeddings(fleet: Fleet) -> None:
    client = InferenceClient(fleet.url("minilm"))
    vectors = client.feature_extraction("a cat " * 600, normalize=False, truncate=True, truncation_direction="left")
    assert vectors.shape == (1, 384)
    assert client.feature_extraction("a cat", dimensions=64).shape == (1, 64)


def test_classes(fleet: Fleet) -> None:
    pipeline = transformers.pipeline("text-classification", str(fleet.folder("classifier")), device="cpu")
    client = InferenceClient(fleet.url("classifier"))
    for top_k in (1, 2, None):
        expected = pipeline(TEXT, top_k=top_k)
        found = client.text_classification(TEXT, top_k=top_k)
        assert [each.label for each in found] == [each["label"] for each in expected]
        np.testing.assert_allclose([each.score for each in found], [each["score"] for each in expected], atol=1e-5)
    assert {each.label for each in found} == set(LABELS)
    (best,) = client.text_classification(TEXT, top_k=1, function_to_apply="none")
    (logit,) = pipeline(TEXT, top_k=1, function_to_apply="none")
    assert np.isclose(best.score, logit["score"], atol=1e-4)


def test_options_of_entities(fleet: Fleet) -> None:
    pipeline: Any = transformers.pipeline("token-classification", str(fleet.folder("tagger")), device="cpu")
    client, text = InferenceClient(fleet.url("tagger")), "Zoë and 东京 🙂 lives in München, " * 60
    choices: list[dict[str, Any]] = [
        {"aggregation_strategy": "max", "stride": 20},
        {"aggregation_strategy": "first", "ignore_labels": []},
    ]
    for options in choices:
        expected = pipeline(text, **options)
        found = client.token_classification(text, **options)
        assert [(each.entity_group, each.word, each.start, each.end) for each in found] == [
            (each["entity_group"], each["word"], each["start"], each["end"]) for each in expected
        ]
        np.testing.assert_allclose([each.score for each in found], [each["score"] for each in expected], atol=1e-4)


def test_options_of_zero_shot_classes(fleet: Fleet) -> None:
    pipeline: Any = transformers.pipeline("zero-shot-classification", str(fleet.folder("nli")), device="cpu")
    options: dict[str, Any] = {"multi_label": True, "hypothesis_template": "It is about {}, is it not?"}
    expected = pipeline(TEXT, ["joy", "trade", "rain"], **options)
    found = InferenceClient(fleet.url("nli")).zero_shot_classification(TEXT, ["joy", "trade", "rain"], **options)
    assert [each.label for each in found] == expected["labels"]
    np.testing.assert_allclose([each.score for each in found], expected["scores"], atol=1e-5)
