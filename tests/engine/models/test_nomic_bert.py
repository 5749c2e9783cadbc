"""nomic-bert as its own code stores it, compared with that code's formulas in float64."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from embert import engine
from embert.engine.encoders.cpu.experts import routing_weights
from embert.engine.encoders.cuda.shapes import refusal
from embert.engine.encoders.self_test import hidden_state
from embert.engine.models import read_config
from embert.engine.models.encoder_config import Attention, DynamicNtk, Rotary
from embert.engine.tasks import Task
from embert.engine.weights.checkpoint import Checkpoint
from tests.engine.conftest import random_sequences
from tests.engine.heads.classifiers import check_bert_classifier
from tests.engine.heads.test_sparse import dense, sparse
from tests.oracles.exact import cosines, hidden_states, near
from tests.oracles.model_cases import build, write_modules
from tests.oracles.nomic_bert import COLUMNS, CONFIG, EXPERTS, VOCABULARY, Older
from tests.server.models import edit_json

LENGTHS = [1, 2, 17, 33, 64, 65, 128, 5]
BIASES = dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rotary_scaling_factor": 2},
        {"rotary_scaling_factor": 2, "rotary_emb_fraction": 0.5},
        {"rotary_emb_fraction": 0.0, "type_vocab_size": 0},
        {"activation_function": "geglu", **BIASES},
        {"activation_function": "gelu", **BIASES, "n_inner": None, "inner": 4 * COLUMNS},
        {"n_inner": 300, "inner": 512},
        {"n_inner": None, "inner": 256, "vocab_size": 70},
        EXPERTS,
        {**EXPERTS, "num_experts": 1, "moe_top_k": 1},
    ],
    ids=str,
)
def test_own_code(tmp_path: Path, config: dict[str, Any]) -> None:
    reference = Older(tmp_path, **config)
    write_modules(tmp_path)
    sequences = random_sequences(LENGTHS, VOCABULARY)
    assert near(tmp_path, sequences, list(map(reference.hidden, sequences))) >= 0.999999
    if reference.config["type_vocab_size"]:
        types = random_sequences([33], reference.config["type_vocab_size"], seed=1)
        encoder = engine.load_encoder(engine.load_model(str(tmp_path)), device="cpu")
        ours = encoder.encode(engine.pack(sequences[3:4], token_types=types), Task.TOKENS)
        assert cosines(ours, reference.hidden(sequences[3], types[0])).min() >= 0.999999


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_experts_give_the_same_bits_in_any_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr("tests.oracles.nomic_bert.COLUMNS", 128)  # int8 needs as many
    Older(tmp_path, **EXPERTS, n_embd=128, n_head=4)
    write_modules(tmp_path)
    sequences = random_sequences([1, 2, 17, 33, 64, 65, 128, 5] * 3, VOCABULARY)
    model = engine.load_model(str(tmp_path))
    encoder = engine.load_encoder(model, device="cpu", dtype=dtype)
    together = encoder.encode(engine.pack(sequences), Task.TOKENS)
    alone = [encoder.encode(engine.pack([ids]), Task.TOKENS) for ids in sequences]
    np.testing.assert_array_equal(together, np.concatenate(alone))
    checkpoint, ids = Checkpoint.open(model), sequences[4]
    np.testing.assert_allclose(alone[4], hidden_state(ids, model.config, checkpoint, int8=dtype == "int8"), atol=1e-4)
    assert refusal(model) is None
    assert "experts" in (refusal(model, "int8") or "")


def test_routing_weights() -> None:
    weights = routing_weights(np.log(np.array([[1, 4, 3, 2], [1, 1, 1, 1]], np.float32)), 2)
    np.testing.assert_allclose(weights, [[0, 0.4, 0.3, 0], [0.25, 0.25, 0, 0]], rtol=1e-6)


def test_both_spellings_give_one_config(tmp_path: Path) -> None:
    """The older spelling of what transformers' own class computes: its tensors lie under the older names anyway."""
    folder = build(tmp_path, "nomic_bert, dynamic", intermediate_size=256)
    own = read_config(folder / "config.json")
    sequences = random_sequences(LENGTHS, 60)
    expected = hidden_states(folder, sequences)
    names = {"n_embd": 64, "n_head": 4, "n_inner": 256, "n_layer": 2, "vocab_size": 64, "rotary_scaling_factor": 2}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **names}))
    older = read_config(folder / "config.json")
    assert dataclasses.replace(older, tensors=own.tensors) == own  # but for biases of its heads
    assert near(folder, sequences, expected) >= 0.999999


def test_numbers_of_own_spelling(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "rotary_scaling_factor": 2.0}))
    read = read_config(path)
    assert (read.model_type, read.max_positions, read.activation, read.gated) == ("nomic_bert", 128, "silu", True)
    assert read.attention == (Attention(Rotary(1000, 16, DynamicNtk(2, 64))),) * 2
    edit_json(path, max_trained_positions=None, rotary_emb_fraction=0.25)
    assert read_config(path).attention[0].rotary == Rotary(1000, 4, DynamicNtk(2, 2048))
    edit_json(path, rotary_emb_fraction=0)
    assert (read_config(path).attention, read_config(path).position_table) == ((), True)


def test_masked_lm_of_own_code(tmp_path: Path) -> None:
    """Neither its dense layer nor its decoder has a bias."""
    reference = Older(tmp_path, architectures=["NomicBertForPreTraining"])
    at, drawn = "cls.predictions.transform", torch.Generator().manual_seed(1)
    head = {
        f"{at}.dense.weight": torch.randn(COLUMNS, COLUMNS, generator=drawn),
        f"{at}.layer_norm.weight": torch.randn(COLUMNS, generator=drawn),
        f"{at}.layer_norm.bias": torch.randn(COLUMNS, generator=drawn),
    }
    words = reference.tensors["embeddings.word_embeddings.weight"].double()
    for stored in ({}, {"cls.predictions.decoder.weight": torch.randn(VOCABULARY, COLUMNS, generator=drawn)}):
        reference.save("bert.", {**head, **stored})
        encoder = engine.load_encoder(engine.load_model(str(tmp_path), pooling="splade"), device="cpu")
        ids = random_sequences([30], VOCABULARY)[0]
        exact = {name: tensor.double() for name, tensor in head.items()}
        x = F.silu(torch.from_numpy(reference.hidden(ids)) @ exact[f"{at}.dense.weight"].T)
        x = F.layer_norm(x, (COLUMNS,), exact[f"{at}.layer_norm.weight"], exact[f"{at}.layer_norm.bias"], 1e-12)
        decoder = stored["cls.predictions.decoder.weight"].double() if stored else words
        weights = (x @ decoder.T).amax(0).relu().log1p().numpy()
        np.testing.assert_allclose(dense(sparse(encoder, [ids]), 0, VOCABULARY), weights, atol=1e-5)


def test_classifier_of_own_code(tmp_path: Path) -> None:
    reference = Older(tmp_path, architectures=["NomicBertForSequenceClassification"], num_labels=2)
    check_bert_classifier(
        tmp_path, functools.partial(reference.save, "bert."), reference.hidden, COLUMNS, 2, VOCABULARY
    )
