"""The self-test of an encoder that is about to serve: which faults fail every request, and which fail few."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from embert import engine
from embert.engine.encoders.self_test import hidden_state, tasks_never_finite
from embert.engine.tasks import NO_TASK, Task
from embert.engine.weights.checkpoint import Checkpoint
from tests.oracles.described import ARCHITECTURES, described
from tests.server.models import build_classifier, copy_model, three_heads

ALL = Task.EMBED | Task.TOKENS | Task.SPARSE | Task.MULTI
CLS, WORD = 101, 5000


def poison(path: Path, name: str, row: int, value: float) -> None:
    tensors = load_file(path)
    tensor = tensors[name] = tensors[name].copy()
    tensor[row] = value
    path.unlink()
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("file", "name", "row", "value", "never"),
    [
        ("model.safetensors", "encoder.layer.3.output.dense.weight", 0, np.nan, ALL),
        ("model.safetensors", "embeddings.LayerNorm.bias", 0, np.inf, ALL),
        ("model.safetensors", "embeddings.word_embeddings.weight", CLS, np.nan, ALL),
        ("model.safetensors", "embeddings.word_embeddings.weight", WORD, np.nan, NO_TASK),
        ("model.safetensors", "embeddings.position_embeddings.weight", 200, np.nan, NO_TASK),
        ("colbert_linear.safetensors", "weight", 0, np.nan, Task.MULTI),
    ],
)
def test_what_fails_every_request(tmp_path: Path, file: str, name: str, row: int, value: float, never: Task) -> None:
    three_heads(tmp_path)
    poison(tmp_path / file, name, row, value)
    model = engine.load_model(str(tmp_path))
    with engine.Engine.load(model, device="cpu") as loaded:
        assert tasks_never_finite(model, loaded.encoder) == never


def test_models_without_faults(tmp_path: Path) -> None:
    for folder in (copy_model(tmp_path / "embeds"), build_classifier(tmp_path / "classifies", "a", "b")):
        model = engine.load_model(str(folder))
        with engine.Engine.load(model, device="cpu") as loaded:
            assert tasks_never_finite(model, loaded.encoder) == NO_TASK


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_expected_vectors_are_the_cpu_encoders(tmp_path: Path, kind: str) -> None:
    """Of models with all biases that their layers may have."""
    model, ids = described(tmp_path, kind), np.arange(24, dtype=np.int32)
    rows = engine.load_encoder(model, device="cpu").encode(engine.pack([ids]), Task.TOKENS)
    np.testing.assert_allclose(hidden_state(ids, model.config, Checkpoint.open(model)), rows, atol=1e-4)
