"""README and docs/models.md name the families that the code reads, and what it makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.families import ROWS, TABLES, replaced
from embert.engine.families import FAMILIES


def test_every_family_has_a_row() -> None:
    assert {each for row in ROWS for each in row.model_types} == set(FAMILIES)


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.name)
def test_tables_are_made_from_the_code(page: Path) -> None:
    assert "| family | " in page.read_text()
    assert page.read_text() == replaced(page), "run scripts/document"
