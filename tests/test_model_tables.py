"""README and docs/models.md name the models that the code reads, and what it makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.model_tables import ROWS, TABLES, replaced
from embert.engine.models import MODEL_TYPES
from tests.csrc.model_checkpoints import CHECKPOINTS


def test_every_model_type_has_a_row() -> None:
    assert {each for row in ROWS for each in row.model_types} == set(MODEL_TYPES)


def test_a_gpu_is_named_where_a_test_has_one() -> None:
    """tests/csrc/test_models_on_gpu.py, and the same checkpoints without a GPU in test_model_forwards.py."""
    tested = {name.partition(",")[0] for name in CHECKPOINTS}
    on_gpu = [row for row in ROWS if "GPU" in row.devices]
    assert on_gpu
    for row in on_gpu:
        assert row.config_read().model_type in tested, row
        assert {*row.model_types} - {"new"} <= tested, row  # GTE's older code: tests/engine/models/test_gte.py


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.name)
def test_tables_are_made_from_the_code(page: Path) -> None:
    assert "| model | " in page.read_text()
    assert page.read_text() == replaced(page), "run scripts/document"
