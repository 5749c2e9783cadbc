"""The record of a run."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.lib import record


def test_a_record_has_a_line_for_each_row(tmp_path: Path) -> None:
    figures = {"model": "a", "rows": [{"ms": [1.5, 2]}, {"ms": []}], "none": []}
    path = record.write("speed", figures, tmp_path)
    assert json.loads(path.read_text())["figures"] == figures
    assert '\n   {"ms": [1.5, 2]},\n' in path.read_text()
