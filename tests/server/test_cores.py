"""The default number of HTTP processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from embert.engine.host import visible_gpus
from embert.server.config import ServeConfig


def pretend_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr("embert.server.config.options.visible_gpus", lambda: gpus)


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (7, 1), (8, 2), (192, 4)])
def test_the_default_is_one_for_every_four_cores(monkeypatch: pytest.MonkeyPatch, cores: int, processes: int) -> None:
    pretend_cores(monkeypatch, cores)
    pretend_gpus(monkeypatch, 0)
    assert ServeConfig().http_processes == processes
    assert ServeConfig(workers=3).http_processes == 3


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 2), (6, 5), (16, 12), (192, 24)])
def test_the_default_beside_gpus_is_three_quarters_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, processes: int
) -> None:
    pretend_cores(monkeypatch, cores)
    pretend_gpus(monkeypatch, 2)
    assert ServeConfig().http_processes == processes
    assert ServeConfig(device="cuda:1").http_processes == min(12, processes)
    for on_cpu in (ServeConfig(device="cpu"), ServeConfig(encoder="cpu")):
        assert on_cpu.http_processes == max(1, min(4, cores // 4))


@pytest.mark.parametrize(("chosen", "gpus"), [(None, 2), ("", 0), ("-1", 0), ("1", 1), ("0,1,2", 2), ("GPU-6af0", 1)])
def test_gpus_are_those_that_cuda_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, gpus: int
) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    if chosen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus(tmp_path) == gpus
    assert visible_gpus(tmp_path / "none") == 0
