"""Devices of each of several models: one process a device."""

from __future__ import annotations

from typing import Any

import pytest

from embert.engine import load_model
from embert.engine.encoders import devices as module
from embert.engine.encoders.devices import devices_of

MODEL = load_model()
UNFIT = "a model that no GPU runs"
AUTO = ("auto", "auto", "auto", MODEL)


@pytest.fixture(autouse=True)
def refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "refusal", lambda model, dtype: "no" if model is UNFIT or dtype == "float32" else None)


def placed(monkeypatch: pytest.MonkeyPatch, gpus: int, *models: tuple[str, str, str, Any]) -> list[list[str]]:
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


def test_each_may_have_devices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert placed(monkeypatch, 4, ("cuda:0,1", "auto", "auto", MODEL), ("cuda:3", "auto", "auto", MODEL)) == [
        ["cuda:0", "cuda:1"],
        ["cuda:3"],
    ]
