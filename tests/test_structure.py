"""Every folder says what it holds, and imports go one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.live import ROOT

ROOMS = ("server", "engine", "embert/ray", "benchmarks", "loadtests")
RECORDS = ROOT / "benchmarks" / "results"  # a file for each machine, of no code


def is_made(path: Path) -> bool:
    """Whether something that runs has made it."""
    return path.name.startswith(".") or path.suffix in (".pyc", ".so") or "__pycache__" in path.parts


def files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file() and not is_made(path)]


FOLDERS = sorted(
    folder
    for room in ROOMS
    for folder in (ROOT / room, *(ROOT / room).rglob("*"))
    if folder.is_dir() and folder != RECORDS and not is_made(folder) and files(folder)
)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("folder", FOLDERS, ids=named)
def test_a_folder_says_what_it_is(folder: Path) -> None:
    """In the first line of its __init__.py or README."""
    module = folder / "__init__.py"
    if (folder / "README.md").is_file():
        assert (folder / "README.md").read_text().strip()
    else:
        assert ast.get_docstring(ast.parse(module.read_text())), module


def test_imports_go_one_way() -> None:
    """The contracts in pyproject.toml."""
    pytest.importorskip("importlinter", reason="import-linter is of the extra dev")
    lint = Path(sys.executable).with_name("lint-imports")
    ran = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
