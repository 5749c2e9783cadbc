"""Imports of benchmarks/ go one way, every benchmark is in the README's table, and a record names its command."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.live import ROOT, environment

FOLDERS = {
    "encoder": {"rivals", "lib"},
    "kernels": {"encoder", "rivals", "lib"},
    "ray": {"lib"},
    "server": {"rivals", "lib"},
    "soak": {"rivals", "lib"},
    "rivals": {"lib"},
    "lib": set[str](),
}
FOLDER = ROOT / "benchmarks"


def imports(module: Path) -> set[str]:
    """Every module that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_run_one_way(folder: str) -> None:
    for module in (FOLDER / folder).glob("*.py"):
        imported = {name.split(".")[1] for name in imports(module) if name.startswith("benchmarks.")}
        assert imported <= {folder, *FOLDERS[folder]}, module
        assert not any(name.split(".")[0] in ("tests", "loadtests") for name in imports(module)), module


def test_every_benchmark_is_in_the_table() -> None:
    runnable = [path for path in FOLDER.rglob("*.py") if '__name__ == "__main__"' in path.read_text()]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for path in runnable}
    table = set(re.findall(r"`python -m (benchmarks[\w.]+)", (FOLDER / "README.md").read_text()))
    assert names == table


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
