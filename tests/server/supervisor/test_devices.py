"""Devices that `--device` and `--encoder` mean, and those of each of several models: one process a device."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from embert.engine import load_model
from embert.engine.encoders import devices as module
from embert.engine.encoders.devices import devices, devices_of


@pytest.mark.parametrize(
    ("device", "encoder", "gpus", "wanted"),
    [
        ("auto", "auto", 0, ["auto"]),
        ("auto", "auto", 1, ["auto"]),  # it may still turn out that the model cannot run there
        ("auto", "auto", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("auto", "torch", 3, ["auto"]),
        ("auto", "cuda", 2, ["cuda:0", "cuda:1"]),
        ("cpu", "auto", 3, ["cpu"]),
        ("cuda", "auto", 0, ["cuda"]),  # the engine says why not
        ("cuda", "auto", 1, ["cuda:0"]),
        ("cuda", "auto", 2, ["cuda:0", "cuda:1"]),
        ("cuda:1", "auto", 3, ["cuda:1"]),
        ("cuda:0,2", "auto", 3, ["cuda:0", "cuda:2"]),
    ],
)
def test_what_a_device_means(
    monkeypatch: pytest.MonkeyPatch, device: str, encoder: str, gpus: int, wanted: list[str]
) -> None:
    monkeypatch.setattr(module, "gpu_memory", lambda: [80 << 30] * gpus)
    assert devices(device, encoder) == wanted


def test_a_driver_that_hangs_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", 60)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(subprocess, "run", hang)
    assert devices("auto") == ["auto"]
    assert devices("cuda") == ["cuda"]


def test_code_in_the_working_folder_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("print(7)\nprint(7)\nraise SystemExit\n")  # two GPUs, it would be
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert devices("auto") == ["auto"]


@pytest.mark.parametrize(
    ("counting", "auto", "cuda"),
    [
        ("pass", ["auto"], ["cuda"]),
        ("print(85520809984)", ["auto"], ["cuda:0"]),
        ("print(85520809984); print(0)", ["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"]),
        ("print(0); print(0); raise SystemExit(1)", ["auto"], ["cuda"]),  # died of the driver
    ],
)
def test_gpus_are_counted_in_another_process(
    monkeypatch: pytest.MonkeyPatch, counting: str, auto: list[str], cuda: list[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(module, "_ASK", counting)
    assert devices("auto") == auto
    assert devices("cuda") == cuda


def test_gpus_that_are_hidden_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the real count, with the CUDA extension or without."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    asked: list[subprocess.CompletedProcess[str]] = []
    run = subprocess.run

    def noting(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(run(*arguments, **options))
        return asked[-1]

    monkeypatch.setattr(subprocess, "run", noting)
    assert devices("auto") == ["auto"]
    assert devices("cuda") == ["cuda"]
    assert [(each.returncode, each.stdout, each.stderr) for each in asked] == [(0, "", "")] * 2


# --- several models ---

MODEL = load_model()
UNFIT = "a model that no GPU runs"
AUTO = ("auto", "auto", "auto", MODEL)


def placed(monkeypatch: pytest.MonkeyPatch, gpus: int, *models: tuple[str, str, str, Any]) -> list[list[str]]:
    monkeypatch.setattr(module, "refusal", lambda model, dtype: "no" if model is UNFIT or dtype == "float32" else None)
    monkeypatch.setattr(module, "gpu_memory", lambda: [80 << 30] * gpus)
    return devices_of(models)


def test_one_model_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placed(monkeypatch, 1, AUTO) == [["auto"]]
    assert placed(monkeypatch, 0, AUTO) == [["auto"]]


def test_without_a_gpu_all_share_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placed(monkeypatch, 0, AUTO, AUTO, ("auto", "cpu", "auto", MODEL)) == [["auto"]] * 3
    assert placed(monkeypatch, 0, AUTO, ("cpu", "auto", "auto", MODEL)) == [["cpu"]] * 2


def test_what_a_gpu_cannot_run_does_not_keep_it_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    unfit = ("auto", "auto", "auto", UNFIT)
    assert placed(monkeypatch, 1, AUTO, unfit, ("cuda:0", "auto", "auto", MODEL)) == [["cuda:0"], ["cpu"], ["cuda:0"]]
    assert placed(monkeypatch, 2, AUTO, unfit) == [["cuda:0", "cuda:1"], ["cpu"]]
    float32 = ("auto", "auto", "float32", MODEL)
    assert placed(monkeypatch, 1, AUTO, float32) == [["cuda:0"], ["cpu"]]
    assert placed(monkeypatch, 2, AUTO, float32) == [["cuda:0", "cuda:1"], ["cpu"]]
    assert placed(monkeypatch, 2, float32) == [["auto"]]


def test_each_may_have_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placed(monkeypatch, 4, ("cuda:0,1", "auto", "auto", MODEL), ("cuda:3", "auto", "auto", MODEL)) == [
        ["cuda:0", "cuda:1"],
        ["cuda:3"],
    ]
