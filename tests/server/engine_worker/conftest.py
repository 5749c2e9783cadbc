"""The engine that tests of this folder drive, and its clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.engine_worker.harness import Clock, Harness


@pytest.fixture(autouse=True)
def _no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of the machine must not put a probe between the batches of a test."""
    monkeypatch.setattr("embert.server.engine_worker.loop.PROBE_INTERVAL_S", 3600.0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("embert.server.engine_worker.loop.time", made)
    return made
