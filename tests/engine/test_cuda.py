"""Decisions and refusals of the CUDA encoder on the host, with a stand-in for the extension."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from embert import engine
from embert.engine.batch import PackedBatch
from embert.engine.encoders.cuda import encoder as cuda
from embert.engine.encoders.cuda.encoder import CudaEncoder
from embert.engine.encoders.cuda.shapes import refusal, shares_tasks
from embert.engine.encoders.cuda.weights import select_dtype
from embert.engine.encoders.self_test import tasks_never_finite
from embert.engine.errors import BrokenModel, EncoderError, UnsupportedModel
from embert.engine.model import Model
from embert.engine.models.encoder_config import Adapters, Attention, DynamicNtk, Rotary
from embert.engine.tasks import NO_TASK, Task
from embert.engine.weights.checkpoint import Checkpoint
from tests.engine.conftest import BuildBert, Floats, Install, ModelFolder
from tests.engine.stand_in_gpu import StandInEncoder, StandInGpu
from tests.oracles.described import LAYERS, described
from tests.server.models import three_heads


@pytest.fixture
def model(build_bert: BuildBert) -> Model:
    return engine.load_model(str(build_bert()))


def batch(ids: list[int], **more: Any) -> PackedBatch:
    return PackedBatch(np.array(ids, np.int32), np.array([0, len(ids)], np.int32), **more)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (np.zeros_like, "its vector is all zeros"),
        (lambda vectors: vectors * np.nan, "its vector is not finite"),
        (lambda vectors: np.roll(vectors, 1, axis=1), "of its length off, at most 0.1 is rounding"),
        # Right alone, wrong among many rows, which take other kernels.
        (lambda vectors: vectors if len(vectors) == 1 else np.zeros_like(vectors), "its vector is all zeros"),
    ],
    ids=["zeros", "NaN", "other columns", "zeros in a full batch"],
)
def test_encoder_whose_kernels_do_nothing_does_not_start(
    model: Model, install: Install, spoil: Callable[[Floats], Floats], reason: str
) -> None:
    install(model, spoil=spoil)
    with pytest.raises(UnsupportedModel, match=f"self test in a batch of .*{reason}"):
        engine.load_encoder(model, device="cuda")
    # Where nobody asked for CUDA, the CPU serves and says why.
    encoder = engine.load_encoder(model)
    assert encoder.device == "cpu"
    assert encoder.choice.startswith("the GPU is not used: ")
    assert reason in encoder.choice


def test_old_gpu(model: Model, install: Install) -> None:
    install(model, capability=75)
    reason = "A GPU has compute capability 7.5"
    assert str(cuda.unavailable_reason()).startswith(reason)
    for asked in ("cuda", "cuda:0"):
        with pytest.raises(UnsupportedModel, match=f"device {asked} cannot be used: {reason}"):
            engine.load_encoder(model, device=asked)
    encoder = engine.load_encoder(model)
    assert encoder.device == "cpu"
    assert encoder.choice.startswith(f"no CUDA device: {reason}; ")


@pytest.mark.parametrize(
    ("stored", "factor", "reason"),
    [
        (torch.float32, 1e6, r"has an element of .*, and float16 ends at 65504"),
        (torch.bfloat16, 2e-6, r"has elements of .* on average, too small for float16"),
    ],
)
def test_weights_that_float16_does_not_hold(
    build_bert: BuildBert, install: Install, stored: torch.dtype, factor: float, reason: str
) -> None:
    folder = build_bert(dtype=stored)
    name = "encoder.layer.1.intermediate.dense.weight"
    weights = load_file(folder / "model.safetensors")
    weights[name] = weights[name] * factor
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = engine.load_model(str(folder))
    gpu = install(model)
    encoder = engine.load_encoder(model)
    assert (encoder.dtype, gpu.encoders[0].config.dtype) == ("bfloat16", "bfloat16")
    assert f"bfloat16 because {name} has" in encoder.choice
    with pytest.raises(
        UnsupportedModel, match=f"cannot be run in float16: {name} {reason}; choose bfloat16 or float32"
    ):
        engine.load_encoder(model, device="cuda", dtype="float16")
    assert engine.load_encoder(model, device="cuda", dtype="float32").dtype == "float32"


def test_hidden_states_of_gemma_exceed_float16(model_folder: ModelFolder, tmp_path: Path) -> None:
    """Whatever its weights are; Qwen's are held. Weights that are not finite are still found."""
    for case, expected in (("gemma3_text", "bfloat16"), ("qwen3", "float16")):
        model = engine.load_model(str(model_folder(case)))
        checkpoint = Checkpoint.open(model)
        dtype, reason = select_dtype("auto", model, checkpoint)
        assert (dtype, "65504" in reason) == (expected, expected == "bfloat16")
        for other in ("bfloat16", "float32"):
            assert select_dtype(other, model, checkpoint) == (other, "")
    gemma = engine.load_model(str(copytree(model_folder("gemma3_text"), tmp_path / "copy")))
    for narrow in ("float16", "int8"):
        with pytest.raises(UnsupportedModel, match=f"in {narrow}: hidden states of gemma3_text.*choose bfloat16"):
            select_dtype(narrow, gemma, Checkpoint.open(gemma))
    path = gemma.weights_folder / "model.safetensors"
    weights = load_file(path)
    weights["layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(BrokenModel, match=r"layer\.1\.output\.dense\.weight"):
        select_dtype("auto", gemma, Checkpoint.open(gemma))


@pytest.mark.parametrize(
    ("stored", "bad"), [(torch.float32, np.nan), (torch.float16, np.inf), (torch.bfloat16, np.nan)], ids=str
)
def test_weights_that_are_not_finite(build_bert: BuildBert, install: Install, stored: torch.dtype, bad: float) -> None:
    folder = build_bert(dtype=stored)
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][7, 3] = bad
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = engine.load_model(str(folder))
    install(model)
    with pytest.raises(BrokenModel, match=r"embeddings\.word_embeddings\.weight has elements that are not finite"):
        engine.load_encoder(model, device="cuda")


def test_dimensions_are_refused_by_name(model: Model, install: Install) -> None:
    install(model)
    for encoder in (CudaEncoder(model), engine.load_encoder(model, device="cpu")):
        for wrong in (-1, 65):
            with pytest.raises(EncoderError, match=f"dimensions of sequence 0 must be 0 to 64, found {wrong}"):
                encoder.encode(batch([5, 6], dimensions=np.array([wrong], np.int32)))


def test_in_int8_only_tables_have_to_fit_float16(build_bert: BuildBert, install: Install) -> None:
    path = build_bert(hidden_size=128, intermediate_size=384) / "model.safetensors"
    weights = load_file(path)
    weights["encoder.layer.0.output.dense.weight"][0, 0] = 1e5
    save_file(weights, path, {"format": "pt"})
    model = engine.load_model(str(path.parent))
    install(model)
    encoder = CudaEncoder(model, dtype="int8")
    assert (encoder.dtype, encoder.choice) == ("int8", "hopper matrix products in int8, the rest in float16")
    weights["embeddings.word_embeddings.weight"] += torch.tensor(1e5)
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"int8: embeddings\.word_embeddings"):
        CudaEncoder(model, dtype="int8")


def test_int8_refuses_weights_whose_norms_cannot_be_folded(
    build_bert: BuildBert, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine.load_model(str(build_bert(hidden_size=128, intermediate_size=384)))
    install(model)
    monkeypatch.setattr(StandInEncoder, "start", lambda _: "a row before it is not finite")
    with pytest.raises(UnsupportedModel, match="int8: a row before it is not finite"):
        CudaEncoder(model, dtype="int8")


@pytest.fixture
def made(tmp_path: Path, install: Install, request: pytest.FixtureRequest) -> tuple[Model, StandInGpu]:
    """A model of the kind that the test names, and a stand-in for the extension."""
    model = described(tmp_path, request.param)
    return model, install(model)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"attention": (Attention(None, 0),) * LAYERS}, "has windows of one token"),
        ({"activation": "silu", "gated": False}, "has silu in a feed-forward network without a gate"),
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


ALL = Task.EMBED | Task.TOKENS | Task.SPARSE | Task.MULTI
CLS, WORD = 101, 5000


def poison(path: Path, name: str, row: int, value: float) -> None:
    tensors = load_file(path)
    tensor = tensors[name] = tensors[name].clone()
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
