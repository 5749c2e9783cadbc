from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from embert.engine.encoders.cuda.encoder import unavailable_reason
from tests.csrc.device import Device

NEEDS_GPU = re.compile(r"^pytestmark = pytest\.mark\.gpu$", re.MULTILINE)


class SkippedModule(pytest.Module):
    """Tests that need a GPU, on a machine without one: thousands, whose collection would take seconds."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        pytest.skip(str(unavailable_reason()), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> SkippedModule | None:
    if unavailable_reason() is None or not NEEDS_GPU.search(module_path.read_text()):
        return None
    skipped: SkippedModule = SkippedModule.from_parent(parent, path=module_path)
    return skipped


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = unavailable_reason()
    for item in items:
        if reason is not None and item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        if "PYTEST_XDIST_WORKER" in os.environ and item.get_closest_marker("exclusive") is not None:
            item.add_marker(pytest.mark.skip(reason="wants the GPU for itself: pytest -m exclusive"))


@pytest.fixture
def device() -> Iterator[Device]:
    pytest.importorskip("embert.engine._cuda_testing", reason="needs a build with EMBERT_TESTING=ON")
    made = Device()
    yield made
    made.free()


@pytest.fixture
def random() -> np.random.Generator:
    """Fresh inputs each run; the seed is printed with a failing test."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return np.random.default_rng(seed)
