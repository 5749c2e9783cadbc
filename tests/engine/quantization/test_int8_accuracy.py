"""The accuracy that int8 costs a model: measured at load, reported, and refused if it is too much."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from embert import engine
from embert.engine.engine import Engine
from embert.engine.errors import UnsupportedModel
from embert.engine.int8_accuracy import sentences
from embert.engine.model import Model, load_model
from embert.engine.quantization.accuracy import accuracy_of_labels, accuracy_of_rows, neighbor_recall
from tests.engine.conftest import BuildBert, small_tokenizer
from tests.engine.heads.classifiers import build_classifier
from tests.engine.heads.late_interaction import COLUMNS, pylate
from tests.engine.quantization.test_cpu import WIDE
from tests.oracles.model_cases import MODEL_CASES, build


@pytest.mark.cpu("kernels")
def test_encoder_says_how_well_it_agrees(default_model: Model) -> None:
    with Engine.load(default_model, device="cpu", dtype="int8") as loaded:
        found = loaded.encoder.int8_accuracy
        assert loaded.encoder.dtype == "int8"
        assert found is not None
        with Engine.load(default_model, device="cpu") as exact:
            assert exact.encoder.int8_accuracy is None
            again = accuracy_of_rows(loaded.embed(sentences()), exact.embed(sentences()), dtype="float32")
        assert found.worst == pytest.approx(again.worst, abs=2e-4)
        assert found.neighbors == pytest.approx(again.neighbors, abs=0.02)
        assert found.worst >= 0.999
        assert again.neighbors is not None
        assert again.neighbors >= 0.97
        assert str(found) in loaded.encoder.choice
        assert f"cosine to float32 {found.worst:.4f} at worst" in str(found)


@pytest.mark.cpu("kernels")
def test_too_little_agreement_is_refused(build_bert: BuildBert) -> None:
    model = load_model(str(build_bert(**WIDE)))
    with pytest.raises(UnsupportedModel, match=r"int8 .* float32: .* 0\.99999"):
        engine.load_encoder(model, device="cpu", dtype="int8", min_agreement=0.99999)
    engine.load_encoder(model, device="cpu", min_agreement=0.99999).close()  # float32 agrees with itself
    with pytest.raises(UnsupportedModel, match=r"min_agreement .* 1\.5"):
        engine.load_encoder(model, device="cpu", dtype="int8", min_agreement=1.5)


@pytest.mark.cpu("kernels")
def test_reranker_and_a_classifier_are_compared_by_logits(tmp_path: Path) -> None:
    for labels in (1, 3):
        folder = build_classifier(tmp_path / str(labels), labels=labels, **WIDE)
        with Engine.load(str(folder), device="cpu", dtype="int8", min_agreement=0.5) as loaded:
            found = loaded.encoder.int8_accuracy
            assert found is not None
            assert (found.measure, found.neighbors) == ("correlation", None)
            assert 0.9 < found.worst < 1
            assert found.difference is not None
            assert 0 < found.difference < 0.5  # of random weights, whose logits are large
            assert "a score differs by" in loaded.encoder.choice


@pytest.mark.cpu("kernels")
def test_splade_and_late_interaction_are_compared_by_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splade = build(tmp_path / "splade", "bert", vocab_size=99, head="ForMaskedLM", modules=False, **WIDE)
    small_tokenizer(99).save(str(splade / "tokenizer.json"))
    for model in (
        load_model(str(splade), pooling="splade"),
        load_model(str(late_interaction(tmp_path / "late", monkeypatch))),
    ):
        with Engine.load(model, device="cpu", dtype="int8", min_agreement=0.5) as loaded:
            found = loaded.encoder.int8_accuracy
            assert found is not None
            assert found.measure == "cosine"
            assert 0.5 < found.worst < found.median < 1
            assert found.median > 0.98
            assert found.neighbors is not None


def test_neighbors_are_counted() -> None:
    random = np.random.default_rng(0)
    vectors = random.normal(size=(40, 16)).astype(np.float32)
    assert neighbor_recall(vectors, vectors * 3) == 1
    assert neighbor_recall(vectors, random.permutation(vectors)) < 0.6
    moved = vectors.copy()
    moved[:, 0] += 0.3 * random.normal(size=40).astype(np.float32)
    assert 0.6 < neighbor_recall(moved, vectors) < 1
    assert neighbor_recall(vectors[:1], vectors[:1]) == 1


def test_worst_row_and_the_worst_label_count() -> None:
    rows = np.eye(12, 5, dtype=np.float32) + 0.1
    other = rows.copy()
    other[3] = rows[4]
    found = accuracy_of_rows(other, rows, dtype="float16")
    assert (found.dtype, found.texts) == ("float16", 12)
    assert found.median == pytest.approx(1)
    assert found.worst == pytest.approx(float(rows[3] @ rows[4] / np.linalg.norm(rows[3]) / np.linalg.norm(rows[4])))
    logits = np.random.default_rng(1).normal(size=(30, 2)).astype(np.float32)
    turned = logits * [1, -1] + 7
    labels = accuracy_of_labels(turned.astype(np.float32), logits, (logits, logits + 0.25), dtype="float32")
    assert labels.worst == pytest.approx(-1)
    assert labels.difference == pytest.approx(0.25)


def late_interaction(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PyLate's files around an encoder that is wide enough."""
    monkeypatch.setitem(MODEL_CASES, "bert", ("Bert", {**MODEL_CASES["bert"][1], **WIDE}))
    dense = pylate(folder) / "1_Dense"
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps({**config, "in_features": 128}))
    save_file({"linear.weight": torch.randn(COLUMNS, 128) * 0.2}, dense / "model.safetensors")
    return folder
