"""The guard of the server's own cost fails when a stage is too far above its baseline in every run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.server import hot_path
from benchmarks.server.hot_path import RUNS


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    file = tmp_path / "baseline.json"
    file.write_text(json.dumps({"calls": {"http": 100.0}, "stages": {"http": 2.0, "engine": 1.0}}))
    return file


def run(monkeypatch: pytest.MonkeyPatch, baseline: Path, *runs: tuple[float, float], calls: float = 100.0) -> int:
    """The number of runs that are measured, each with these figures."""
    figures = [{"http": http, "engine": engine} for http, engine in runs]
    left = iter(figures)
    monkeypatch.setattr(hot_path, "_calls", lambda _: {"http": calls})
    monkeypatch.setattr(hot_path, "_run", lambda _: next(left))
    hot_path.main(["--baseline", str(baseline)])
    return len(figures) - len(list(left))


def test_stage_above_its_baseline_in_every_run_fails(monkeypatch: pytest.MonkeyPatch, baseline: Path) -> None:
    with pytest.raises(SystemExit, match="http"):
        run(monkeypatch, baseline, (3.5, 1.0), (3.6, 1.6), (3.1, 1.0))


def test_one_good_run_is_enough_for_a_stage(monkeypatch: pytest.MonkeyPatch, baseline: Path) -> None:
    assert run(monkeypatch, baseline, (2.3, 1.1)) == 1
    assert run(monkeypatch, baseline, (3.5, 1.0), (3.0, 1.6)) == 2
    assert run(monkeypatch, baseline, (3.5, 1.6), (3.0, 1.6), (3.5, 1.5)) == RUNS


def test_calls_have_a_smaller_tolerance(monkeypatch: pytest.MonkeyPatch, baseline: Path) -> None:
    assert run(monkeypatch, baseline, (2.3, 1.1), calls=101.9) == 1
    with pytest.raises(SystemExit, match="calls a request"):
        run(monkeypatch, baseline, calls=102.1)
