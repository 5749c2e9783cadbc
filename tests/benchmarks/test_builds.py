"""Builds side by side: turns, ratios and bits with stub encoders, a build from a file, and a real run on a GPU."""

from __future__ import annotations

import importlib
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
