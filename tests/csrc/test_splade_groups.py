"""The texts of a batch in groups for SPLADE's head, and again where their pairs do not fit: decided on the host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.csrc.host_program import HOST_SIDE, build, output_of

pytestmark = pytest.mark.timeout(600)  # compilers, on cores that others may use

EMBED, SPARSE = 1, 8


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("splade"), Path(__file__).with_name("recorded_splade.cpp"), *HOST_SIDE)


def calls(
    program: Path, batch: Sequence[tuple[int, int]], *, overflow: bool = False
) -> dict[str, list[dict[str, int]]]:
    """Arguments of the encoder's calls by name, for texts of these lengths and tasks."""
    found: dict[str, list[dict[str, int]]] = {}
    for line in output_of(program, int(overflow), *itertools.chain(*batch)).splitlines():
        name, *pairs = line.split()
        values = dict(pair.split("=") for pair in pairs)
        found.setdefault(name, []).append({key: int(value) for key, value in values.items()})
    return found


def test_many_texts_are_taken_in_groups(program: Path) -> None:
    found = calls(program, [(1, SPARSE)] * 1500 + [(2, SPARSE)] * 700)
    groups = [(each["text"], each["texts"], each["end"]) for each in found["begin_maxima"]]
    assert groups == [(0, 1024, 1024), (1024, 1024, 2596), (2048, 152, 2900)]
    assert found["result"] == [{"task": SPARSE, "rows": 4400, "columns": 1}]


@pytest.mark.parametrize("others", [0, EMBED])
def test_texts_whose_pairs_do_not_fit_run_again(program: Path, others: int) -> None:
    """There is room for two texts' pairs."""
    lengths = [20, 33, 15, 500, 70, 40]
    found = calls(program, [(n, SPARSE | others if n != 500 else EMBED) for n in lengths], overflow=True)
    runs = [(each["texts"], each["chosen"] >= 0, each["end"]) for each in found["begin_maxima"]]
    assert runs == [(5, True, 678), (2, False, 85), (1, False, 40)]
    rows = {each["task"]: each["rows"] for each in found["result"]}
    assert rows == {EMBED: 6 if others else 1, SPARSE: 5 * ((8 << 20) // 3 + 1)}
