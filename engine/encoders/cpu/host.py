"""The machine below the CPU encoder: the C library's heap, and the CPU's name."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

__all__ = ["cpu_name", "keep_freed_memory"]


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
    """What people call this CPU: "AMD EPYC"."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
