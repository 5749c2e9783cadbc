"""huggingface_hub's InferenceClient at a URL."""

from __future__ import annotations

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
