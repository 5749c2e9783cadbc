from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from embert.engine.encoders.cuda.encoder import unavailable_reason
from tests.csrc.device import Device


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
