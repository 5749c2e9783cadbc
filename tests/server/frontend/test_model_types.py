"""Families over HTTP: a random checkpoint's vectors and classes beside HuggingFace's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.engine.conftest import Ids, small_tokenizer, unit
from tests.engine.heads.classifiers import build_classifier
from tests.engine.model_cases import MODEL_CASES, build
from tests.engine.models.exact import Doubles, hidden_states
from tests.engine.models.test_gte import written
from tests.engine.models.test_jina_bert_v2 import VOCABULARY, JinaBert
from tests.server.live import Live, live

TEXTS = ["a", "some words and 5 more", "?", "many words " * 13]  # the last is of 119 tokens
PAIR = ("what is it", "a pair of texts")


NAMES = [name for name in MODEL_CASES if "," not in name]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family."""
    return {name: build_classifier(tmp_path_factory.mktemp(name), name) for name in NAMES}


@pytest.fixture(scope="module")
def families(folders: dict[str, Path]) -> Iterator[Live]:
    """One server of them all."""
    models = [f"{name}={folder}" for name, folder in folders.items()]
    with live(*models, "--device", "cpu", "--pooling", "mean") as server:
        yield server


@pytest.mark.parametrize("family", NAMES)
def test_a_random_checkpoint(families: Live, folders: dict[str, Path], family: str) -> None:
    folder = folders[family]
    backend = small_tokenizer(99)
    assert families.get(f"/models/{family}/info").json()["max_input_length"] == 128
    vectors = families.post("/v1/embeddings", {"model": family, "input": TEXTS}).json()["data"]
    asked = {"inputs": [[TEXTS[3]], PAIR], "raw_scores": True}
    classes = families.post(f"/models/{family}/predict", asked).json()
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


def check_vectors(folder: Path, expected: Callable[[list[Ids]], list[Doubles]]) -> None:
    """`expected`: hidden states, [L, hidden] for each text's ids. They are asked for before the server reads a file."""
    backend = small_tokenizer(VOCABULARY)
    backend.save(str(folder / "tokenizer.json"))
    states = expected([np.array(backend.encode(text).ids, np.int32) for text in TEXTS])
    with live(str(folder), "--device", "cpu") as server:
        vectors = server.post("/v1/embeddings", {"input": TEXTS}).json()["data"]
    wanted = unit(np.stack([each.mean(0) for each in states]))
    np.testing.assert_allclose([each["embedding"] for each in vectors], wanted, atol=1e-5)


def test_jina_bert_v2(tmp_path: Path) -> None:
    reference = JinaBert(tmp_path)
    check_vectors(tmp_path, lambda sequences: list(map(reference.hidden, sequences)))


def test_gte_as_its_first_checkpoints_store_it(tmp_path: Path) -> None:
    folder = build(tmp_path, "gte", vocab_size=VOCABULARY)

    def expected(sequences: list[Ids]) -> list[Doubles]:
        states = hidden_states(folder, sequences)
        written(folder / "config.json", rope_scaling=None)
        return states

    check_vectors(folder, expected)
