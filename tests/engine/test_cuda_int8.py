"""What the CUDA extension is given of a model in int8, before a stand-in for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from embert import engine
from embert.engine.encoders.cuda import encoder as cuda
from embert.engine.encoders.cuda.encoder import CudaEncoder
from embert.engine.encoders.cuda.weights import column_factors
from embert.engine.errors import UnsupportedModel
from embert.engine.model import Model
from embert.engine.quantization.blocks import HEAD, block_weight, quarter_weight
from embert.engine.weights.checkpoint import Checkpoint
from tests.engine.model_cases import build
from tests.engine.stand_in_gpu import StandInEncoder, StandInGpu

MATRICES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention": "attention.output.dense",
    "inner": "intermediate.dense",
    "out": "output.dense",
}


Install = Callable[[Model], StandInGpu]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a stand-in in the extension's place."""

    def installed(model: Model) -> StandInGpu:
        gpu = StandInGpu(model)
        monkeypatch.setattr(cuda, "_extension", lambda: gpu)
        return gpu

    return installed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = build(tmp_path, "bert", hidden_size=128, intermediate_size=384)
    (made / "tokenizer.json").write_text("{}")
    return made


@pytest.fixture
def wide(folder: Path) -> Model:
    return engine.load_model(str(folder))


def test_layers_are_given_in_8_bits_and_all_else_as_it_is_stored(folder: Path, wide: Model, install: Install) -> None:
    gpu = install(wide)
    encoder = CudaEncoder(wide, dtype="int8")
    (ours,) = gpu.encoders
    assert (encoder.dtype, ours.shape["dtype"]) == ("int8", "int8")
    assert encoder.choice == "hopper matrix products in int8, the rest in float16"
    stored = load_file(folder / "model.safetensors")
    factors = column_factors(wide.config, Checkpoint.open(wide))
    assert any((each != 1).any() for each in factors.values())
    for layer in range(2):
        for name, theirs in MATRICES.items():
            weight = stored[f"encoder.layer.{layer}.{theirs}.weight"].numpy()
            weight = weight * factors.get(f"encoder.layer.{layer}.{theirs}", np.float32(1))
            block = {"out": 128, "attention": HEAD if wide.config.head_size == HEAD else 0}.get(name, 0)
            integers, scales = block_weight(weight, "weight", block) if block else quarter_weight(weight, "weight")
            np.testing.assert_array_equal(ours.loaded[f"{name}.weight", layer], integers)
            np.testing.assert_array_equal(ours.loaded[f"{name}.scale", layer], scales)
            np.testing.assert_array_equal(
                ours.loaded[f"{name}.bias", layer], stored[f"encoder.layer.{layer}.{theirs}.bias"].numpy()
            )
        before = "embeddings" if layer == 0 else f"encoder.layer.{layer - 1}.output"
        for name, norm in (("query", before), ("inner", f"encoder.layer.{layer}.attention.output")):
            by = factors[f"encoder.layer.{layer}.{MATRICES[name]}"]
            for part, theirs in (("gamma", "weight"), ("beta", "bias")):
                wanted = stored[f"{norm}.LayerNorm.{theirs}"].numpy()
                np.testing.assert_array_equal(ours.loaded[f"{name}.{part}", layer] * by, wanted)
    assert {array.dtype for (name, _), array in ours.loaded.items() if name.partition(".")[0] not in MATRICES} == {
        np.dtype(np.float32)
    }
    assert not [name for name, _ in ours.loaded if name.endswith(".scale") and name[:-6] not in MATRICES]


def test_only_tables_have_to_fit_float16(folder: Path, install: Install) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layer.0.output.dense.weight"][0, 0] = 1e5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = engine.load_model(str(folder))
    install(model)
    assert CudaEncoder(model, dtype="int8").dtype == "int8"
    weights["embeddings.word_embeddings.weight"] += torch.tensor(1e5)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"cannot be run in int8: embeddings\.word_embeddings"):
        CudaEncoder(engine.load_model(str(folder)), dtype="int8")


def test_weights_whose_layernorms_cannot_come_with_products_are_refused(
    wide: Model, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(wide)
    monkeypatch.setattr(StandInEncoder, "start", lambda _: "a row before it is not finite")
    with pytest.raises(UnsupportedModel, match="in int8: a row before it is not finite"):
        CudaEncoder(wide, dtype="int8")
