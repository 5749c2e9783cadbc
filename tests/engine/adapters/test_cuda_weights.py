"""Every encoder of the extension has the weights of one adapter, added to the model's; the extension is a stand-in."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from embert import engine
from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.memory_estimate import estimate_memory
from embert.engine.model import Model
from embert.engine.weights.checkpoint import Checkpoint
from tests.engine.adapters.on_gpu import Make
from tests.engine.stand_in_gpu import StandInEncoder
from tests.oracles.jina_v3 import TASKS, flash


def test_each_adapter_has_an_encoder_with_a_self_test(model: Model, make: Make) -> None:
    """One with the weights of the adapter before it, or of none, does not start."""
    _, gpu = make(model)
    assert len(gpu.encoders) == 6
    load = StandInEncoder.load
    given: dict[tuple[int, str, int], Any] = {}
    wrong = 0

    def swapped(self: StandInEncoder, name: str, layer: int, data: Any, shape: Any, dtype: str) -> None:
        number = self.gpu.encoders.index(self)
        given[number, name, layer] = data
        if number == wrong and name in ("word", "query.weight", "inner.weight"):
            data = given[number - 1, name, layer]
        load(self, name, layer, data, shape, dtype)

    for wrong in (1, 2, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StandInEncoder, "load", swapped)
            with pytest.raises(UnsupportedModel, match=f"float16: with the adapter {TASKS[wrong - 1]} the self test"):
                make(model)


def test_weights_without_an_adapter_are_as_they_are_stored(tmp_path: Path, make: Make) -> None:
    """In 16 bits they are then not rounded again. Those with one are added up in float32."""
    flash(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(path).items()}, path)
    model = engine.load_model(str(tmp_path))
    _, gpu = make(model)
    checkpoint = Checkpoint.open(model)
    for (name, layer), ours in (
        (("word", -1), "embeddings.word_embeddings.weight"),
        (("value.weight", 1), "encoder.layer.1.attention.self.value.weight"),
    ):
        stored, low_rank = checkpoint.stored(ours), checkpoint.low_rank(ours)
        assert low_rank is not None
        assert gpu.encoders[0].loaded[name, layer].dtype == np.float16
        np.testing.assert_array_equal(gpu.encoders[0].loaded[name, layer], stored.array)
        for number in range(5):
            given = gpu.encoders[1 + number].loaded[name, layer]
            assert given.dtype == np.float32
            added = 1.5 * low_rank.left[number].astype(np.float64) @ low_rank.right[number]
            np.testing.assert_allclose(given, stored.array + added, rtol=1e-5, atol=1e-6)
    assert all(each.loaded["out.bias", 0].dtype == np.float16 for each in gpu.encoders)  # adapters add nothing to it


def change(folder: Path, number: int, factor: float) -> Model:
    """The model whose adapter of that number adds `factor` times as much to the first layer's inner weight."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    stored["roberta.encoder.layers.0.mlp.fc1.parametrizations.weight.0.lora_B"][number] *= factor
    save_file(stored, path)
    return engine.load_model(str(folder))


def test_adapter_whose_weights_float16_does_not_hold(tmp_path: Path, make: Make) -> None:
    flash(tmp_path)
    model = change(tmp_path, 3, 1e6)
    encoder, gpu = make(model)
    reason = f"inner.weight of layer 0 with the adapter {TASKS[3]} has an element of"
    assert encoder.dtype == "bfloat16"
    assert f"; bfloat16 because in float16 {reason}" in encoder.choice
    assert [each.config.dtype for each in gpu.encoders] == ["float16"] * 5 + ["bfloat16"] * 6
    assert encoder._encoders == gpu.encoders[5:]
    with pytest.raises(UnsupportedModel, match=f"in float16: {reason} .*, and float16 ends at 65504"):
        make(model, dtype="float16")
    assert make(model, dtype="float32")[0].dtype == "float32"


def test_adapter_that_is_not_finite(tmp_path: Path, make: Make) -> None:
    flash(tmp_path)
    model = change(tmp_path, 4, float("nan"))
    with pytest.raises(BrokenModel, match=f"inner.weight of layer 0 with the adapter {TASKS[4]} has elements that are"):
        make(model)


def test_memory_that_is_planned(model: Model) -> None:
    config = dataclasses.replace(model.config, adapters=None)
    plain = dataclasses.replace(model, config=config)
    for dtype in ("auto", "float32"):
        with_adapters, without = (estimate_memory(each, device="cuda:0", dtype=dtype) for each in (model, plain))
        assert (with_adapters.weights, with_adapters.activations) == (6 * without.weights, 6 * without.activations)
        assert with_adapters.loading == without.loading  # they load one after the other
    with_adapters, without = (estimate_memory(each, device="cpu") for each in (model, plain))
    stored = load_file(model.folder / "model.safetensors")
    names = [name for name in stored if ".lora_" in name]
    low_rank = 4 * sum(stored[name].numel() for name in names)
    assert with_adapters.activations == without.activations
    assert (
        low_rank <= with_adapters.weights - without.weights <= 1.25 * low_rank
    )  # apart, q, k and v have one side each
