"""The CPUs, the memory and the GPUs that this process may use, from its affinity, its cgroups, and their parents.

CPUs are those of the affinity mask, limited by the cgroups' quota. A container limited to 2 CPUs on a host of 64 may be
scheduled on all 64. With 64 threads it exhausts its quota early in every period and is throttled until the next.

Memory is the machine's, or the cgroups' limit for this process and its children.

And what the CPU encoder asks of the C library's heap.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


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
    """Lines of a file; none if it is missing or may not be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _groups(root: Path, controller: str) -> dict[int, str]:
    """The cgroup of this process, by cgroup version."""
    folders = {}
    for line in lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            folders[2] = path
        elif controller in controllers.split(","):
            folders[1] = path
    return folders


def _mounts(root: Path, controller: str) -> Iterator[tuple[int, str, str]]:
    """Mounts of the controller's cgroups: the version, which cgroup, and the folder."""
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


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs that this process may use, at least 1; `root` is where /proc and /sys are.

    A quota of 2.5 CPUs counts as 2: the threads of a batch wait for the slowest, so a third one that is throttled costs
    more than it computes.
    """
    quota = min(_quotas(root), default=float("inf"))
    return max(1, int(min(len(os.sched_getaffinity(0)), quota)))


def usable_cores(root: Path = Path("/")) -> int:
    """Threads for arithmetic: the cores of the usable CPUs, two of which may share one, at most OMP_NUM_THREADS."""
    folders = (root / f"sys/devices/system/cpu/cpu{number}/topology" for number in os.sched_getaffinity(0))
    cores = {" ".join(lines(folder / "thread_siblings_list")) or folder for folder in folders}
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(len(cores), usable_cpus(root), max(1, int(limit)) if limit.isdecimal() else len(cores))


def visible_gpus(root: Path = Path("/")) -> int:
    """NVIDIA GPUs for the CUDA encoder, as far as their device files and CUDA_VISIBLE_DEVICES show.

    A call of CUDA takes a second, and its driver stays in a process.
    """
    if importlib.util.find_spec("embert.engine._cuda") is None:
        return 0
    found = sum(each.name.removeprefix("nvidia").isdigit() for each in (root / "dev").glob("nvidia*"))
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if setting is None else min(found, sum(each.strip() not in ("", "-1") for each in setting.split(",")))


def blas_threads() -> dict[str, str]:
    """Return the variable that limits OpenBLAS's threads in a new process, or none where the caller's environment does.

    numpy brings OpenBLAS, which starts a thread for each CPU of the affinity mask, whatever the quota is.
    """
    if os.environ.keys() & {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"}:
        return {}
    return {"OPENBLAS_NUM_THREADS": str(usable_cpus())}


def _quotas(root: Path) -> Iterator[float]:
    """The limits, in CPUs, of this process's cgroups and of the cgroups that those are in."""
    for version, folder in group_folders(root, "cpu"):
        quota = _quota_2(folder) if version == 2 else _quota_1(folder)
        if quota is not None:
            yield quota


def _quota_2(folder: Path) -> float | None:
    """cpu.max: microseconds of CPU time and of the period, or `max`."""
    words = " ".join(lines(folder / "cpu.max")).split()
    return None if len(words) != 2 or words[0] == "max" else int(words[0]) / int(words[1])


def _quota_1(folder: Path) -> float | None:
    """Reads the quota of version 1, which has it in two files; -1 is none."""
    quota, period = (" ".join(lines(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
    return None if not quota or not period or int(quota) <= 0 else int(quota) / int(period)


_LIMITS = {1: "memory.limit_in_bytes", 2: "memory.max"}  # by cgroup version


def usable_memory(root: Path = Path("/")) -> int | None:
    """Bytes without swap; None where the machine does not say. `root` is where /proc and /sys are."""
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


def keep_freed_memory() -> None:
    """Ask glibc to keep freed buffers instead of returning them to the system.

    Every forward allocates and frees the same few megabytes. With glibc's defaults each time costs their page faults,
    which made attention up to three times slower. One heap for all threads lets one thread use what another has freed.
    Other C libraries lack the call or ignore it.
    """
    trim_threshold, mmap_threshold, arena_max, keep_bytes = -1, -3, -8, 256 << 20
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(trim_threshold, keep_bytes)
        mallopt(mmap_threshold, keep_bytes)
        mallopt(arena_max, 1)


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
