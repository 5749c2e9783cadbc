"""The plan of a server's models: what cannot be read or does not fit does not take the others along."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embert.server.cli import models
from embert.server.cli.models import plan
from embert.server.config import ConfigError, ServeConfig, model_configs
from embert.server.supervisor.planned_model import PlannedModel
from tests.server.models import build_classifier, copy_model, edit_json

MIB = 1 << 20


def planned(*models: str) -> tuple[list[PlannedModel], dict[str, str]]:
    return plan(model_configs(ServeConfig(model=models, device="cpu")), lambda *_: None)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_classifier(tmp_path_factory.mktemp("good"), "a", "b")


ODD: tuple[Any, ...] = (None, 10**40, "", {"x": [["y"]]})
ADDED = ("id2label", "num_labels", "problem_type", "layer_types", "rope_scaling")  # to what the files have
GARBAGE = (b"", b"[" * 200_000, b"\xff", b"null", b"[1]", b'[{"type": 1}]', b'{"a": "\\ud800"}')


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "modules.json",
        "1_Pooling/config.json",
        "sentence_bert_config.json",
        "tokenizer_config.json",
        "config_sentence_transformers.json",
    ],
)
def test_files_with_anything_in_them(good: Path, tmp_path: Path, name: str) -> None:
    """Every field with values of another type, and contents that are not an object."""
    path = copy_model(tmp_path) / name
    original = json.loads(path.read_text())
    contents = [*GARBAGE]
    if isinstance(original, dict):
        fields = [*original, *(ADDED if name == "config.json" else ())]
        contents += [json.dumps({**original, field: value}).encode() for field in fields for value in ODD]
    path.unlink()
    for content in contents:
        path.write_bytes(content)
        models, broken = planned(f"bad={tmp_path}", f"good={good}")
        assert [each.start.name for each in models] == (["good"] if broken else ["bad", "good"])


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    models, broken = planned(f"a={copy_model(tmp_path, without=('tokenizer.json',))}")
    assert models == []
    assert "has no tokenizer.json" in broken["a"]
    assert "save_pretrained" in broken["a"]  # the command that makes one


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**9},
        {"hidden_size": 12 * 10**7, "num_attention_heads": 12},
        {"intermediate_size": 10**9},
        {"max_position_embeddings": 10**9},
        {"type_vocab_size": 2**31 - 1},
        {"id2label": None, "num_labels": 10**12},
    ],
)
def test_a_shape_that_cannot_be(good: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    config = (build_classifier(tmp_path, "a") if "num_labels" in fields else copy_model(tmp_path)) / "config.json"
    edit_json(config, **fields)
    models, broken = planned(f"bad={tmp_path}", f"good={good}")
    assert [(each.start.number, each.start.name) for each in models] == [(0, "good")]
    assert str(config) in broken["bad"]


def test_whatever_a_reader_raises(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_model(tmp_path)

    def read(folder: Path) -> Any:
        if folder == tmp_path:
            raise MemoryError("of a reader")
        return {}, None

    monkeypatch.setattr("embert.engine.model.read_prompts", read)
    models, broken = planned(f"bad={tmp_path}", f"good={good}")
    assert [each.start.name for each in models] == ["good"]
    assert "MemoryError: of a reader" in broken["bad"]


def test_model_that_a_gpu_does_not_run_in_a_dtype_is_on_the_cpu(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("embert.engine.encoders.devices.gpu_memory", "embert.server.cli.models.gpu_memory"):
        monkeypatch.setattr(name, lambda: [80 << 30])
    config = ServeConfig(model=(f"fits={copy_model(tmp_path)}", f"small={good}"), dtype="int8")
    models, _ = plan(model_configs(config), lambda *_: None)
    assert [each.devices for each in models] == [("cuda:0",), ("cpu",)]
    (line,) = [each.message for each in caplog.records if "runs on the CPU" in each.message]
    assert "int8" in line


def test_memory_of_a_model_that_no_gpu_runs_is_the_hosts(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("embert.engine.encoders.devices.gpu_memory", "embert.server.cli.models.gpu_memory"):
        monkeypatch.setattr(name, lambda: [MIB])
    with pytest.raises(ConfigError, match="auto's memory"):
        plan(model_configs(ServeConfig(model=(str(good),))), lambda *_: None)
    models, _ = plan(model_configs(ServeConfig(model=(str(good),), dtype="int8")), lambda *_: None)
    assert [each.devices for each in models] == [("auto",)]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda size: monkeypatch.setattr(models, "usable_memory", lambda: size)


def test_models_that_do_not_fit_are_refused_with_the_sum(tmp_path: Path, memory: Callable[[int], None]) -> None:
    models = [f"{name}={copy_model(tmp_path / name)}" for name in ("a", "b")]
    memory(340 * MIB)
    with pytest.raises(ConfigError, match=r"of the host's memory.*\(a .* \+ b .*--max-batch-tokens"):
        planned(*models)
    assert len(planned(models[0])[0]) == 1


def test_a_model_that_does_not_fit_alone_is_left_out(good: Path, tmp_path: Path, memory: Callable[[int], None]) -> None:
    memory(200 * MIB)
    models, broken = planned(f"large={copy_model(tmp_path)}", f"good={good}")
    assert [(each.start.number, each.start.name) for each in models] == [(0, "good")]
    assert "of the host's memory" in broken["large"]
    with pytest.raises(ConfigError, match=r"0\.2.*\(weights \d.* \+ activations \d.* \+ the process \d.*--dtype"):
        planned(f"large={tmp_path}")
