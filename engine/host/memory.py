"""How much memory this process and its children may take together: the machine's, or its cgroups' limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from embert.engine.host.cgroups import group_folders, lines

__all__ = ["usable_memory"]

_LIMITS = {1: "memory.limit_in_bytes", 2: "memory.max"}  # by cgroup version


def usable_memory(root: Path = Path("/")) -> int | None:
    """In bytes, swap aside; None where the machine does not say. `root` is where /proc and /sys are."""
    return min(_limits(root), default=None)


def _limits(root: Path) -> Iterator[int]:
    for line in lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemTotal":
            yield 1024 * int(value.split()[0])
    for version, folder in group_folders(root, "memory"):
        limit = " ".join(lines(folder / _LIMITS[version]))
        if limit.isdecimal():  # not `max`
            yield int(limit)
