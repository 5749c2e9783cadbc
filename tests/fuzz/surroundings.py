"""A server seen from beside it: its processes, their memory, its log."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import psutil

__all__ = ["Footprint", "footprint", "grown", "settled", "tracebacks"]

Footprint = dict[int, int]  # pid → RSS in bytes


def footprint(pid: int) -> Footprint:
    """Of a process and all below it."""
    root = psutil.Process(pid)
    found = {}
    for process in (root, *root.children(recursive=True)):
        try:
            found[process.pid] = process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return found


def grown(before: Footprint, after: Footprint, limit: int) -> list[str]:
    """What is wrong with `after`: processes that are others, and those that hold over `limit` bytes more."""
    faults = []
    if set(before) != set(after):
        faults.append(f"processes ended or began: {sorted(before)} before, {sorted(after)} after")
    faults += [
        f"process {pid} holds {after[pid] / 1e6:.0f} MB, {(after[pid] - before[pid]) / 1e6:.0f} MB more than before; "
        f"the limit is {limit / 1e6:.0f}"
        for pid in before.keys() & after.keys()
        if after[pid] - before[pid] > limit
    ]
    return faults


def settled(look: Callable[[], Footprint], before: Footprint, limit: int, patience_s: float) -> list[str]:
    """`grown`, asked again and again until nothing is wrong or `patience_s` is over."""
    until = time.monotonic() + patience_s
    while (faults := grown(before, look(), limit)) and time.monotonic() < until:
        time.sleep(0.2)
    return faults


def tracebacks(log: str) -> list[str]:
    """The tracebacks of a log, with the line before; of those with the same frames the first."""
    pattern = r"(?:[^\n]*\n)?(Traceback \(most recent call last\):\n(?:[ \t][^\n]*\n)*)[^\n]*"
    first: dict[str, str] = {}
    for found in re.finditer(pattern, log):
        first.setdefault(found[1], found[0])
    return list(first.values())
