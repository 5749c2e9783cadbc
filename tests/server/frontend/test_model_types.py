"""Model types over HTTP: a random checkpoint's vectors and classes beside HuggingFace's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.engine.conftest import small_tokenizer, unit
from tests.engine.heads.classifiers import build_classifier
from tests.oracles.model_cases import MODEL_CASES
from tests.server.live import Live, live

TEXTS = ["a", "some words and 5 more", "?", "many words " * 13]  # the last is of 119 tokens
PAIR = ("what is it", "a pair of texts")


NAMES = [name for name in MODEL_CASES if "," not in name]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each model type."""
    return {name: build_classifier(tmp_path_factory.mktemp(name), name) for name in NAMES}


@pytest.fixture(scope="module")
def served(folders: dict[str, Path]) -> Iterator[Live]:
    """One server of them all."""
    models = [f"{name}={folder}" for name, folder in folders.items()]
    with live(*models, "--device", "cpu", "--pooling", "mean") as server:
        yield server


@pytest.mark.parametrize("model_type", NAMES)
def test_a_random_checkpoint(served: Live, folders: dict[str, Path], model_type: str) -> None:
    folder = folders[model_type]
    backend = small_tokenizer(99)
    assert served.get(f"/models/{model_type}/info").json()["max_input_length"] == 128
    vectors = served.post("/v1/embeddings", {"model": model_type, "input": TEXTS}).json()["data"]
    request = {"inputs": [[TEXTS[3]], PAIR], "raw_scores": True}
    classes = served.post(f"/models/{model_type}/predict", request).json()
    reference: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    encoder = getattr(reference, reference.base_model_prefix)
    logits = []
    with torch.inference_mode():
        ids = [torch.tensor([backend.encode(text).ids]) for text in TEXTS]
        expected = np.stack([encoder(each).last_hidden_state[0].mean(0).numpy() for each in ids])
        for pair in ((TEXTS[3],), PAIR):
            encoded = backend.encode(*pair)
            inputs = {"input_ids": torch.tensor([encoded.ids])}
            if getattr(reference.config, "type_vocab_size", 1) > 1:
                inputs["token_type_ids"] = torch.tensor([encoded.type_ids])
            logits.append(reference(**inputs).logits[0].numpy())
    np.testing.assert_allclose([each["embedding"] for each in vectors], unit(expected), atol=1e-5)
    for ranked, row in zip(classes, logits, strict=True):
        scores = {each["label"]: each["score"] for each in ranked}
        np.testing.assert_allclose([scores[f"label {label}"] for label in range(3)], row, atol=1e-4)
