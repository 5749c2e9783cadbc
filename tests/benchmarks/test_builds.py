"""Builds side by side: turns, ratios and bits with stub encoders, a build from a file, and a real run on a GPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.encoder import builds
from benchmarks.lib import record
from embert.engine.encoders.cuda import encoder as cuda


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    monkeypatch.setattr(record, "write", lambda name, of: figures.update({name: of}))
    return figures


@pytest.fixture
def extension() -> str:
    try:
        return str(importlib.import_module("embert.engine._cuda").__file__)
    except ImportError:
        pytest.skip("built without CUDA")


def test_builds_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], written: dict[str, Any]
) -> None:
    asked: list[tuple[str, str]] = []

    class Encoder:
        def __init__(self, folder: Path, pooling: str, build: str) -> None:
            self.build = Path(build).name
            asked.append((self.build, "made"))

        def ask(self, what: str, batch: Any) -> Any:
            asked.append((self.build, what))
            is_old = self.build == "old.so"
            if what == "vectors":
                return np.full((len(batch.cu_seqlens) - 1, 3), 1.0 if is_old else 1.5, np.float32)
            return (4.0 if is_old else 3.0) * (10 if len(asked) < 7 else 1)  # the first round is slow

        def close(self) -> None:
            asked.append((self.build, "closed"))

    monkeypatch.setattr(builds, "CudaProcess", Encoder)
    for name in ("old.so", "new.so"):
        (tmp_path / name).touch()
    builds.main([
        f"before={tmp_path}/old.so", f"after={tmp_path}/new.so", "--models", f"tiny={tmp_path}", "--workloads", "2x8",
        "--sustained", "2x8", "--rounds", "3",
    ])  # fmt: skip
    turns = [("old.so", "burst"), ("new.so", "burst")] * 3 + [("old.so", "sustained"), ("new.so", "sustained")] * 2
    both = [[("old.so", what), ("new.so", what)] for what in ("made", "vectors", "closed")]
    assert asked == [*both[0], *both[1], *turns, *both[2]]
    (row,) = written["builds"]["rows"]
    assert (row["model"], row["workload"], row["tokens"]) == ("tiny", "2x8", 16)
    assert row["ms"] == {"burst": {"before": 4, "after": 3}, "sustained": {"before": 4, "after": 3}}
    assert row["differences"] == {
        "before": {"elements": 0, "of": 6, "largest": 0},
        "after": {"elements": 6, "of": 6, "largest": 0.5},
    }
    table = capsys.readouterr().out
    assert table.count("0.750") == 2
    assert table.count("the same") == 2
    assert table.count("6 of 6 differ, by up to 5.0e-01") == 2


def test_bits_are_compared_not_values() -> None:
    first = np.array([0.0, 1.0, np.nan], np.float32)
    assert builds.differences(first.copy(), first) == {"elements": 0, "of": 3, "largest": None}
    assert builds.differences(np.array([-0.0, 1.0, 2.0], np.float32), first)["elements"] == 2


@pytest.mark.gpu
@pytest.mark.skipif(cuda.unavailable_reason() is not None, reason=cuda.unavailable_reason() or "")
def test_build_compared_with_itself(written: dict[str, Any], extension: str) -> None:
    command = [f"one={extension}", f"two={extension}", "--models", "narrow", "--workloads", "2x8", "--rounds", "1"]
    builds.main(command)
    (row,) = written["builds"]["rows"]
    assert [each["elements"] for each in row["differences"].values()] == [0, 0]
    assert all(ms > 0 for ms in row["ms"]["burst"].values())
