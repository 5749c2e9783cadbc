"""The control groups of this process, of either version, and of the groups that those are in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["group_folders", "lines"]


def group_folders(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Version and folder of every group that may limit this process by `controller`, such as "cpu" or "memory".

    `root` is where /proc and /sys are.
    """
    groups = _groups(root, controller)
    for version, mounted, mount in _mounts(root, controller):
        try:
            inside = PurePosixPath(groups[version]).relative_to(mounted)
        except (KeyError, ValueError):  # of another namespace: what is mounted is then the container's own
            inside = PurePosixPath()
        for part in (inside, *inside.parents):
            yield version, root / mount.lstrip("/") / part


def lines(path: Path) -> list[str]:
    """Lines of a file; none where there is no such file or it may not be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _groups(root: Path, controller: str) -> dict[int, str]:
    """The cgroup of this process, by cgroup version."""
    found = {}
    for line in lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found[2] = path
        elif controller in controllers.split(","):
            found[1] = path
    return found


def _mounts(root: Path, controller: str) -> Iterator[tuple[int, str, str]]:
    """Where cgroups of the controller are mounted: the version, which cgroup, and the folder."""
    for line in lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        if not after.startswith("cgroup"):
            continue
        mounted, mount = before.split()[3:5]
        kind, *_, options = after.split()
        if kind == "cgroup2":
            yield 2, mounted, mount
        elif controller in options.split(","):
            yield 1, mounted, mount
