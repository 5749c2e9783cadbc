"""The folders of csrc: which may include which, and no include cycles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.csrc.host_program import CSRC

# Each folder, and the folders that it may include. A folder comes after all of these.
FOLDERS: dict[str, set[str]] = {
    "cpu": set(),
    "common": set(),
    "ops": {"common"},
    "gemm": {"common", "ops"},
    "attention": {"common", "ops"},
    "heads": {"common", "ops", "gemm"},
    "encoder": {"common", "ops", "gemm", "attention", "heads"},
    "bindings": {"cpu", "common", "ops", "gemm", "attention", "heads", "encoder"},
}


def sources() -> list[Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in (".cu", ".cuh", ".cpp", ".h"))


def included(source: Path) -> list[str]:
    """Our own headers, as they are named: from csrc/."""
    return re.findall(r'^#include "(.+)"', source.read_text(), re.MULTILINE)


def test_the_folders_are_in_order() -> None:
    seen: set[str] = set()
    for folder, below in FOLDERS.items():
        assert below <= seen, folder
        seen.add(folder)


def test_every_source_is_in_a_folder() -> None:
    assert {source.relative_to(CSRC).parts[0] for source in sources()} == set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_includes_only_folders_below_it(folder: str) -> None:
    for source in (CSRC / folder).rglob("*"):
        if source.suffix not in (".cu", ".cuh", ".cpp", ".h"):
            continue
        for name in included(source):
            assert (CSRC / name).is_file(), f"{source}: {name} is no path from csrc/"
            assert name.partition("/")[0] in {folder} | FOLDERS[folder], f"{source.relative_to(CSRC)} includes {name}"


def test_no_header_includes_itself_through_others() -> None:
    includes = {str(source.relative_to(CSRC)): included(source) for source in sources()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join((*path, name))
        if name in done:
            return
        for other in includes[name]:
            visit(other, (*path, name))
        done.add(name)

    for name in includes:
        visit(name, ())
