"""Models with heads, and servers of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import models
from tests.server.live import STAND_IN, Live, live


@pytest.fixture(scope="session")
def three_heads_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.three_heads(tmp_path_factory.mktemp("three_heads"))


@pytest.fixture(scope="session")
def three_heads(three_heads_folder: Path) -> Iterator[Live]:
    """Dense, sparse and multi-vectors, by the CPU encoder."""
    with live(str(three_heads_folder), "--device", "cpu", "--openai-accepts", "token-ids") as running:
        yield running


@pytest.fixture(scope="session")
def late_interaction(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Multi-vectors alone, by the stand-in, of at most 64 tokens a request."""
    folder = models.late_interaction(tmp_path_factory.mktemp("late_interaction"))
    with live(str(folder), *STAND_IN, "--max-batch-tokens", "64") as running:
        yield running


@pytest.fixture(scope="session")
def splade(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Sparse vectors alone, by the stand-in."""
    with live(str(models.splade(tmp_path_factory.mktemp("splade"))), *STAND_IN) as running:
        yield running
