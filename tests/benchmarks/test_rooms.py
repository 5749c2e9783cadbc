"""benchmarks/ in rooms: imports run one way, every benchmark is in the README's table, and its command is recorded."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.live import ROOT, environment

ROOMS = {
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


@pytest.mark.parametrize("room", ROOMS)
def test_imports_run_one_way(room: str) -> None:
    for module in (FOLDER / room).glob("*.py"):
        rooms = {name.split(".")[1] for name in imports(module) if name.startswith("benchmarks.")}
        assert rooms <= {room, *ROOMS[room]}, module
        assert not any(name.split(".")[0] in ("tests", "loadtests") for name in imports(module)), module


def test_every_folder_is_a_room() -> None:
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} - {"results", "__pycache__"} == set(ROOMS)


def benchmarks() -> dict[str, str]:
    """What can be run: the module's name and its source."""
    sources = {path.relative_to(ROOT).with_suffix(""): path.read_text() for path in FOLDER.rglob("*.py")}
    return {
        ".".join(path.parts).removesuffix(".__main__"): source
        for path, source in sources.items()
        if '__name__ == "__main__"' in source
    }


def test_every_benchmark_is_in_the_table() -> None:
    table = set(re.findall(r"`python -m (benchmarks[\w.]+)", (FOLDER / "README.md").read_text()))
    assert set(benchmarks()) == table


@pytest.mark.parametrize(("module", "source"), benchmarks().items(), ids=benchmarks())
def test_a_benchmark_names_itself(module: str, source: str) -> None:
    assert f"    python -m {module} " in (ast.get_docstring(ast.parse(source)) or "")
    assert f'prog="{module}"' in source


@pytest.mark.parametrize("package", [False, True])
def test_a_record_names_its_command(package: bool, tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    module = "room" if package else "room.speed"
    (room / ("__main__.py" if package else "speed.py")).write_text(
        "import json, pathlib\n"
        "from benchmarks.lib import record\n"
        "path = record.write('speed', {}, pathlib.Path('.'))\n"
        "print(json.loads(path.read_text())['command'])\n"
    )
    command = [sys.executable, "-m", module, "--rounds", "3"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == f"python -m {module} --rounds 3\n"
