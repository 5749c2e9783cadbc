"""The folders of csrc: which may include which, and no include cycles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.csrc.host_program import CSRC

# Each room, and the rooms that it may include. A room comes after all of these.
ROOMS: dict[str, set[str]] = {
    "cpu": set(),
    "device": set(),
    "ptx": {"device"},
    "norm": {"device", "ptx"},
    "elementwise": {"device", "ptx"},
    "gemm": {"device", "ptx", "norm", "elementwise"},
    "attention": {"device", "ptx", "norm"},
    "embedding": {"device", "ptx", "norm", "attention"},
    "heads": {"device", "ptx", "norm", "elementwise", "gemm"},
    "model": {"device", "norm", "elementwise", "attention", "embedding", "heads"},
    "runtime": {"device", "norm", "elementwise", "gemm", "attention", "embedding", "heads", "model"},
    "bindings": {"cpu", "device", "norm", "elementwise", "gemm", "attention", "embedding", "heads", "model", "runtime"},
}


def sources() -> list[Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in (".cu", ".cuh", ".cpp", ".h"))


def included(source: Path) -> list[str]:
    """Our own headers, as they are named: from csrc/."""
    return re.findall(r'^#include "(.+)"', source.read_text(), re.MULTILINE)


def test_the_rooms_are_in_order() -> None:
    seen: set[str] = set()
    for room, below in ROOMS.items():
        assert below <= seen, room
        seen.add(room)


def test_every_source_is_in_a_room() -> None:
    assert {source.relative_to(CSRC).parts[0] for source in sources()} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_includes_only_rooms_below_it(room: str) -> None:
    for source in (CSRC / room).rglob("*"):
        if source.suffix not in (".cu", ".cuh", ".cpp", ".h"):
            continue
        for name in included(source):
            assert (CSRC / name).is_file(), f"{source}: {name} is no path from csrc/"
            assert name.partition("/")[0] in {room} | ROOMS[room], f"{source.relative_to(CSRC)} includes {name}"


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
