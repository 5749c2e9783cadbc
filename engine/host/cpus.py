"""How many CPUs this process may keep busy: those it is bound to, and no more than its cgroups' quota pays for.

A container limited to 2 CPUs on a host of 64 is bound to all 64. With a thread for each of them it uses up its quota
early in every period and then stands still until the next.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from embert.engine.host.cgroups import group_folders, lines

__all__ = ["usable_cpus"]


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs that this process may use, at least 1; `root` is where /proc and /sys are.

    A quota of 2.5 CPUs counts as 2: the threads of a batch wait for the slowest, so a third one that is throttled costs
    more than it computes.
    """
    quota = min(_quotas(root), default=float("inf"))
    return max(1, int(min(len(os.sched_getaffinity(0)), quota)))


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
    """The same in two files; a quota of -1 is none."""
    quota, period = (" ".join(lines(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
    return None if not quota or not period or int(quota) <= 0 else int(quota) / int(period)
