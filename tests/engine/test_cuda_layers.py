"""The CUDA extension's arguments for models newer than BERT, with a stand-in for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embert.engine.encoders.cuda.encoder import CudaEncoder
from embert.engine.encoders.cuda.shapes import check_layers, layer_attention, refusal, shares_tasks
from embert.engine.encoders.devices import devices
from embert.engine.errors import UnsupportedModel
from embert.engine.model import Model
from embert.engine.models.encoder_config import Adapters, Attention, DynamicNtk, Rotary
from embert.engine.tasks import NO_TASK, Task
from tests.engine.conftest import Install
from tests.engine.stand_in_gpu import StandInGpu
from tests.oracles.described import LAYERS, described


@pytest.fixture
def made(tmp_path: Path, install: Install, request: pytest.FixtureRequest) -> tuple[Model, StandInGpu]:
    """A model of the kind that the test names, and a stand-in for the extension."""
    model = described(tmp_path, request.param)
    return model, install(model)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"attention": (Attention(None, 0),) * LAYERS}, "has windows of one token"),
        ({"attention": (Attention(head_columns=520),) * LAYERS}, "has heads of 520 columns, over 512"),
        ({"layer_inputs": 12}, "has inputs of layers of 12 columns, which is not a multiple of 8"),
        (
            {"attention": (Attention(Rotary(1e4, 32, DynamicNtk(2.0, 64))),) * LAYERS},
            "stretches rotary positions by each text's length",
        ),
    ],
)
@pytest.mark.parametrize("made", ["Nomic's"], indirect=True)
def test_what_cannot_be_run_is_refused_in_a_sentence(
    made: tuple[Model, StandInGpu], change: dict[str, Any], sentence: str
) -> None:
    model, _ = made
    changed = dataclasses.replace(model, config=dataclasses.replace(model.config, **change))
    with pytest.raises(UnsupportedModel, match=f"{sentence}, which the CUDA encoder does not run$"):
        CudaEncoder(changed)


@pytest.mark.parametrize("made", ["Nomic's"], indirect=True)
def test_stretching_that_no_text_is_long_enough_for_is_none(made: tuple[Model, StandInGpu]) -> None:
    model, _ = made
    attention = (Attention(Rotary(1e4, 32, DynamicNtk(2.0, 128))),) * LAYERS
    changed = dataclasses.replace(model, config=dataclasses.replace(model.config, attention=attention))
    check_layers(changed)
    assert layer_attention(changed.config) == [(0, 32, *[0] * 5)] * LAYERS


@pytest.mark.parametrize(
    ("made", "named"),
    [("ModernBERT's", "gates"), ("ELECTRA's", "narrower"), ("rubert-tiny2's", "26 columns")],
    indirect=["made"],
)
def test_dtype_may_be_what_it_does_not_run_in(made: tuple[Model, StandInGpu], named: str) -> None:
    model, _ = made
    assert [refusal(model, dtype) for dtype in ("auto", "float32", "bfloat16")] == [None] * 3
    assert named in str(refusal(model, "int8"))
    wide = dataclasses.replace(model, config=dataclasses.replace(model.config, hidden_size=2304, heads=36))
    assert "2304 columns" in str(refusal(wide, "float32"))


@pytest.mark.parametrize("made", ["ModernBERT's"], indirect=True)
def test_several_gpus_are_chosen_for_what_they_run(
    made: tuple[Model, StandInGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that no GPU runs is left to the CPU: on each of several GPUs it would be an error."""
    model, _ = made
    monkeypatch.setattr("embert.engine.encoders.devices.gpu_memory", lambda: [80 << 30] * 2)
    unable = dataclasses.replace(
        model, config=dataclasses.replace(model.config, attention=(Attention(None, 0),) * LAYERS)
    )
    both = ["cuda:0", "cuda:1"]
    assert devices("auto", "auto", model) == devices("auto") == both
    assert devices("auto", "auto", unable) == ["auto"]
    assert devices("auto", "cuda", unable) == devices("cuda", "auto", unable) == both


@pytest.mark.parametrize("made", ["ModernBERT's"], indirect=True)
def test_rows_that_float16_does_not_hold_are_in_bfloat16(made: tuple[Model, StandInGpu]) -> None:
    """Vectors of the first encoder, in float16, are not finite."""
    model, gpu = made

    def spoil(vectors: Any) -> Any:
        return vectors * np.nan if gpu.encoders[-1].config.dtype == "float16" else vectors

    gpu.spoil = spoil
    encoder = CudaEncoder(model)
    assert encoder.dtype == "bfloat16"
    assert "bfloat16 because in float16 the self test" in encoder.choice
    with pytest.raises(UnsupportedModel, match="its vector is not finite"):
        CudaEncoder(model, dtype="float16")


@pytest.mark.parametrize(
    ("kind", "pooling", "changes", "shared"),
    [
        ("Qwen3's", "last-token", {}, Task.EMBED),
        ("Qwen3's", "mean", {}, NO_TASK),
        ("Qwen3's", "last-token", {"head_columns": 512}, NO_TASK),
        ("Qwen3's", "last-token", {"adapters": Adapters(("a",), 1, 1.0)}, NO_TASK),
        ("LFM2's", "last-token", {}, NO_TASK),
        ("in both directions", "last-token", {}, NO_TASK),
    ],
)
def test_tasks_that_share_prefixes(
    kind: str, pooling: str, changes: dict[str, Any], shared: Task, tmp_path: Path
) -> None:
    model = described(tmp_path, kind, pooling=pooling)
    assert shares_tasks(dataclasses.replace(model, config=dataclasses.replace(model.config, **changes))) == shared
