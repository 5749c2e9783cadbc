"""CPU, memory, files and start of each process, read from /proc when somebody scrapes.

prometheus_client reports them for its own process alone, and not at all with several processes. So each process leaves
its pid in a file beside its metrics, and whoever answers a scrape looks at all of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["ProcessesCollector", "forget_pid", "leave_pid"]

LEFT_OUT = {"process_virtual_memory_bytes"}  # of a process with CUDA or torch it says nothing
_SUFFIX = ".pid"


def leave_pid(folder: Path, process: str) -> None:
    """Make this process known as `process`. A scrape finds the whole file or none."""
    file = folder / f"{process}{_SUFFIX}"
    new = file.with_suffix(".new_pid")
    new.write_text(str(os.getpid()))
    new.rename(file)


def forget_pid(folder: Path, process: str) -> None:
    """Forget one that has died, before the system gives its pid to another."""
    with contextlib.suppress(OSError):
        (folder / f"{process}{_SUFFIX}").unlink()


class ProcessesCollector:
    """`process_…`, as all Prometheus clients name them, with the label `process`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        """Prometheus' interface."""
        from prometheus_client import ProcessCollector

        together: dict[str, Metric] = {}
        for file in sorted(self._folder.glob(f"*{_SUFFIX}")):
            with contextlib.suppress(OSError):  # the process has just died
                pid = file.read_text()
                for family in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():  # type: ignore[misc]
                    if family.name in LEFT_OUT:
                        continue
                    samples = [sample._replace(labels={"process": file.stem}) for sample in family.samples]
                    family.samples = together[family.name].samples + samples if family.name in together else samples
                    together[family.name] = family
        return together.values()
