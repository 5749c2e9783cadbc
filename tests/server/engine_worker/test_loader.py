"""Models load side by side, but for what a GPU does for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from embert.server.engine_worker.process import LoadProgress


def test_progress_is_reported_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, steps = 100.0, list[str]()
    monkeypatch.setattr("embert.server.engine_worker.process.time", SimpleNamespace(monotonic=lambda: now))
    progress = LoadProgress(steps.append)
    for gigabytes in range(15):
        now += 0.4
        progress(gigabytes * 10**9, 15_200_000_000)
    assert steps == [f"loading the weights, {gigabytes}.0 of 15.2 GB" for gigabytes in (2, 5, 8, 11, 14)]
