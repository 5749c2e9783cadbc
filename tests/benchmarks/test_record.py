"""The record of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib import record
from tests.server.live import environment


def test_a_record_has_a_line_for_each_row(tmp_path: Path) -> None:
    figures = {"model": "a", "rows": [{"ms": [1.5, 2]}, {"ms": []}], "none": []}
    path = record.write("speed", figures, tmp_path)
    assert json.loads(path.read_text())["figures"] == figures
    assert '\n   {"ms": [1.5, 2]},\n' in path.read_text()


@pytest.mark.parametrize("package", [False, True])
def test_record_names_its_command(package: bool, tmp_path: Path) -> None:
    folder = tmp_path / "measured"
    folder.mkdir()
    module = "measured" if package else "measured.speed"
    (folder / ("__main__.py" if package else "speed.py")).write_text(
        "import json, pathlib\n"
        "from benchmarks.lib import record\n"
        "path = record.write('speed', {}, pathlib.Path('.'))\n"
        "print(json.loads(path.read_text())['command'])\n"
    )
    command = [sys.executable, "-m", module, "--rounds", "3"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == f"python -m {module} --rounds 3\n"
