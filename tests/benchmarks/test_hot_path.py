"""The guard of the server's own cost fails when a stage is too far above its baseline in every run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.server import hot_path
from benchmarks.server.hot_path import BASELINE, RUNS, exceeded


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    file = tmp_path / "baseline.json"
    file.write_text(json.dumps({"stages": {"http": 2.0, "engine": 1.0}}))
    return file


def run(monkeypatch: pytest.MonkeyPatch, baseline: Path, *runs: tuple[float, float]) -> int:
    """The number of runs that are made, each with these figures."""
    figures = [{"http": http, "engine": engine} for http, engine in runs]
    made = iter(figures)
    monkeypatch.setattr(hot_path, "_run", lambda _: next(made))
    hot_path.main(["--baseline", str(baseline)])
    return len(figures) - len(list(made))


def test_stage_above_its_baseline_in_every_run_fails(monkeypatch: pytest.MonkeyPatch, baseline: Path) -> None:
    with pytest.raises(SystemExit, match="http"):
        run(monkeypatch, baseline, (2.5, 1.0), (2.6, 1.3), (2.41, 1.0))


def test_one_good_run_is_enough_for_a_stage(monkeypatch: pytest.MonkeyPatch, baseline: Path) -> None:
    assert run(monkeypatch, baseline, (2.3, 1.1)) == 1
    assert run(monkeypatch, baseline, (2.5, 1.0), (2.4, 1.3)) == 2
    assert run(monkeypatch, baseline, (2.5, 1.3), (2.4, 1.3), (2.5, 1.2)) == RUNS


def test_committed_baseline_has_every_stage() -> None:
    stages = json.loads(BASELINE.read_text())["stages"]
    assert len(stages) == 7
    assert all(value > 0 for value in stages.values())
    assert exceeded({stage: 1.21 * value for stage, value in stages.items()}, stages) == set(stages)
