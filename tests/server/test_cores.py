"""The default number of HTTP processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from embert.engine.host import visible_gpus
from embert.server.config import ServeConfig


@pytest.mark.parametrize(
    ("cores", "on_cpu", "with_gpus"),
    [(1, 1, 1), (2, 1, 2), (6, 1, 5), (7, 1, 6), (8, 2, 6), (16, 4, 12), (192, 4, 24)],
)
def test_the_default_is_one_for_every_four_cores_and_more_with_gpus(
    monkeypatch: pytest.MonkeyPatch, cores: int, on_cpu: int, with_gpus: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    for gpus, processes in ((0, on_cpu), (2, with_gpus)):
        monkeypatch.setattr("embert.server.config.options.visible_gpus", lambda gpus=gpus: gpus)
        assert ServeConfig().http_processes == processes
        assert ServeConfig(workers=3).http_processes == 3
    assert ServeConfig(device="cuda:1").http_processes == min(12, with_gpus)
    for config in (ServeConfig(device="cpu"), ServeConfig(encoder="cpu")):
        assert config.http_processes == on_cpu


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
