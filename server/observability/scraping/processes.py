"""CPU, memory, files and start of each process, read from /proc when somebody scrapes.

prometheus_client reports them for its own process alone, and not at all with several processes. So each process leaves
its pid beside its metrics, and the process that answers a scrape reads all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from embert.server.observability.metric_memory import MetricMemory

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["ProcessesCollector"]

LEFT_OUT = {"process_virtual_memory_bytes"}  # of a process with CUDA or torch it says nothing


class ProcessesCollector:
    """`process_…`, as all Prometheus clients name them, with the label `process`."""

    def __init__(self, memory: MetricMemory) -> None:
        self._memory = memory

    def collect(self) -> Iterable[Metric]:
        """Prometheus' interface."""
        from prometheus_client import ProcessCollector

        together: dict[str, Metric] = {}
        for region in sorted(self._memory.regions, key=lambda each: each.name):
            with contextlib.suppress(OSError):  # the process has just died
                if not (pid := region.pid):
                    continue
                for family in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():  # type: ignore[misc]
                    if family.name in LEFT_OUT:
                        continue
                    samples = [sample._replace(labels={"process": region.name}) for sample in family.samples]
                    family.samples = together[family.name].samples + samples if family.name in together else samples
                    together[family.name] = family
        return together.values()
