"""Families over HTTP: a random checkpoint's vectors and classes beside HuggingFace's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.engine.conftest import small_tokenizer, unit
from tests.engine.families import FAMILIES
from tests.engine.heads.classifiers import build_classifier
from tests.server.live import live

TEXTS = ["a", "some words and 5 more", "?", "many words " * 13]  # the last is of 119 tokens
PAIR = ("what is it", "a pair of texts")


@pytest.mark.parametrize("family", [name for name in FAMILIES if "," not in name])
def test_a_random_checkpoint(tmp_path: Path, family: str) -> None:
    folder = build_classifier(tmp_path, family)
    backend = small_tokenizer(99)
    with live(str(folder), "--device", "cpu", "--pooling", "mean") as server:
        assert server.get("/info").json()["max_input_length"] == 128
        vectors = server.post("/v1/embeddings", {"input": TEXTS}).json()["data"]
        classes = server.post("/predict", {"inputs": [[TEXTS[3]], PAIR], "raw_scores": True}).json()
    theirs: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    encoder = getattr(theirs, theirs.base_model_prefix)
    logits = []
    with torch.inference_mode():
        ids = [torch.tensor([backend.encode(text).ids]) for text in TEXTS]
        expected = np.stack([encoder(each).last_hidden_state[0].mean(0).numpy() for each in ids])
        for given in ((TEXTS[3],), PAIR):
            found = backend.encode(*given)
            inputs = {"input_ids": torch.tensor([found.ids])}
            if getattr(theirs.config, "type_vocab_size", 1) > 1:
                inputs["token_type_ids"] = torch.tensor([found.type_ids])
            logits.append(theirs(**inputs).logits[0].numpy())
    np.testing.assert_allclose([each["embedding"] for each in vectors], unit(expected), atol=1e-5)
    for ranked, row in zip(classes, logits, strict=True):
        scores = {each["label"]: each["score"] for each in ranked}
        np.testing.assert_allclose([scores[f"label {label}"] for label in range(3)], row, atol=1e-4)
