"""Exemplars: beside a bucket's count, the id of a request that fell into it.

prometheus_client keeps them in the memory of one process, and not at all with several processes. So each API process
writes its own beside its metrics, at most once a second, and the process that answers a scrape adds all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NoReturn

import msgspec

from embert.server.observability.metric_memory import MetricMemory, Region

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["ExemplarOf", "WithExemplars", "publish"]

PUBLISH_INTERVAL_S = 1.0
MOST_CHARACTERS = 128  # of an exemplar's label and its value; OpenMetrics' limit


class ExemplarOf(msgspec.Struct, array_like=True):
    """One of a histogram's bucket."""

    labels: dict[str, str]  # of the bucket, with `le`
    kind: str  # trace_id or request_id
    id: str
    value: float
    time: float  # Unix time

    @property
    def fits(self) -> bool:
        """Whether it is short enough for a scrape."""
        return len(self.kind) + len(self.id) <= MOST_CHARACTERS


async def publish(region: Region, take: Callable[[], list[ExemplarOf]]) -> NoReturn:
    """Write what `take` returns, where that has changed, for ever."""
    written = b""
    while True:
        data = msgspec.msgpack.encode(take())
        if data != written:
            region.put_exemplars(data)
            written = data
        await asyncio.sleep(PUBLISH_INTERVAL_S)


class WithExemplars:
    """A collector's metrics, and the exemplars of one of them."""

    def __init__(self, collect: Callable[[], Iterable[Metric]], histogram: str, memory: MetricMemory) -> None:
        self._collect, self._histogram, self._memory = collect, histogram, memory

    def collect(self) -> Iterable[Metric]:
        """Prometheus' interface."""
        from prometheus_client.samples import Exemplar

        newest = self._read()
        for metric in self._collect():
            if metric.name == self._histogram:
                for index, sample in enumerate(metric.samples):
                    if found := newest.get(frozenset(sample.labels.items())):
                        exemplar = Exemplar({found.kind: found.id}, found.value, found.time)
                        metric.samples[index] = sample._replace(exemplar=exemplar)
            yield metric

    def _read(self) -> dict[frozenset[tuple[str, str]], ExemplarOf]:
        """The newest of all processes, by the labels of their bucket."""
        newest: dict[frozenset[tuple[str, str]], ExemplarOf] = {}
        written = filter(None, (region.exemplars for region in self._memory.regions))
        for data in written:
            for each in msgspec.msgpack.decode(data, type=list[ExemplarOf]):
                key = frozenset(each.labels.items())
                if key not in newest or newest[key].time < each.time:
                    newest[key] = each
        return newest
