"""The CPU encoder in int8 compared with the definition and with float32: measured at load, reported, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from embert import engine
from embert.engine.batch import pack
from embert.engine.encoders.loader import create_encoder
from embert.engine.encoders.self_test import hidden_state
from embert.engine.engine import Engine
from embert.engine.errors import UnsupportedModel
from embert.engine.int8_accuracy import sentences
from embert.engine.model import Model, load_model
from embert.engine.quantization.accuracy import accuracy_of_labels, accuracy_of_rows, neighbor_recall
from embert.engine.tasks import Task
from embert.engine.tokenization.tokenizer import Tokenizer
from embert.engine.weights.checkpoint import Checkpoint
from tests.engine.conftest import BuildBert, Floats, Ids, random_sequences, small_tokenizer, unit, without_own_kernels
from tests.engine.heads.classifiers import build_classifier
from tests.engine.heads.late_interaction import COLUMNS, pylate
from tests.oracles.model_cases import MODEL_CASES, build

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}


@pytest.mark.cpu("kernels")
def test_width_that_does_not_fit_is_refused_by_name(build_bert: BuildBert) -> None:
    with pytest.raises(UnsupportedModel, match=r"encoder\.layer\.0\.output\.dense\.weight has 96"):
        Engine.load(str(build_bert(hidden_size=128)), device="cpu", dtype="int8")


@pytest.mark.cpu("kernels")
@pytest.mark.instructions
@pytest.mark.parametrize("case", ["default", "nomic_bert", "gte", "modernbert", "mpnet", "albert", "deberta-v2"])
def test_encoders_are_near_the_definition(default_model: Model, case: str, tmp_path: Path) -> None:
    """Rows are nearer to the numpy model in eight bits than to the exact one: at most by a share of the way.

    Where the last bit of a float32 turns an integer over, a row may leave the model's by a thousandth, and which rows
    do so is the CPU's own. So no single row is held to a bound.
    """
    if case == "default":
        # After six layers most of what int8 costs is noise of rounding, and each of the two has its own.
        model, sequences, share = default_model, sequences_of(default_model, 2), 0.9
    else:
        folder = build(tmp_path / "model", case, **WIDE)
        small_tokenizer(64).save(str(folder / "tokenizer.json"))
        # Without the padding token, whose position is not the next one.
        sequences = [np.maximum(ids, 4) for ids in random_sequences([3, 17, 60, 17], 64)]
        model, share = load_model(str(folder)), 0.1
    checkpoint = Checkpoint.open(model)
    exact, wanted = (
        np.concatenate([hidden_state(ids, model.config, checkpoint, int8=int8) for ids in sequences])
        for int8 in (False, True)
    )
    encoder = create_encoder(model, device="cpu", dtype="int8", encoder="cpu")
    found = encoder.encode(pack(sequences), Task.TOKENS)
    encoder.close()
    error, cost = 1 - cosines(found, wanted), 1 - cosines(exact, wanted)
    assert np.median(error) < share * np.median(cost)
    assert error.mean() < share * cost.mean()


def test_int8_needs_kernels(default_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModel, match="dtype int8 is not supported on a CPU by the torch encoder"):
        Engine.load(default_model, device="cpu", dtype="int8", encoder="torch")
    without_own_kernels(monkeypatch)
    with pytest.raises(UnsupportedModel, match="int8 on the cpu encoder needs embert's kernels"):
        Engine.load(default_model, device="cpu", dtype="int8")


def sequences_of(model: Model, texts: int) -> list[Ids]:
    """Token ids of English texts."""
    encoded = Tokenizer(model).encode(sentences()[:texts])
    return np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])


def cosines(ours: Floats, theirs: Floats) -> Floats:
    found: Floats = (unit(ours) * unit(theirs)).sum(1)
    return found


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
