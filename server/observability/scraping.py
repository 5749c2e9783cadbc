"""Responses to Prometheus scrapes: `GET /metrics` of each HTTP process has the metrics of all processes.

With several processes, prometheus_client has neither exemplars nor metrics from /proc. So each process writes its pid
and its exemplars next to its metrics, and the process that serves a scrape reads all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from embert.server.observability.metric_memory import MetricMemory, Region

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.samples import Exemplar

GZIP_LEVEL = 4  # a tenth of the bytes in a third of the time of the usual 9
WITH_EXEMPLARS = "embert_request_duration_seconds"
SKIPPED_METRICS = {"process_virtual_memory_bytes"}  # without meaning for a process with CUDA or torch


@dataclass(frozen=True, slots=True)
class Form:
    """The format of a response to a scrape."""

    openmetrics: bool = False  # which has exemplars; False: Prometheus' text format
    gzip: bool = False


@dataclass(frozen=True, slots=True)
class Exposition:
    """Body and header fields of a response."""

    body: bytes
    headers: tuple[tuple[bytes, bytes], ...]


def exposition(memory: MetricMemory, form: Form = Form()) -> Exposition:
    from prometheus_client import generate_latest
    from prometheus_client.openmetrics import exposition as openmetrics

    collector: Any = _Collector(memory, exemplars=form.openmetrics)  # the functions use `collect` of a registry only
    if form.openmetrics:
        content_type = b"application/openmetrics-text; version=1.0.0; charset=utf-8"
        body: bytes = openmetrics.generate_latest(collector)  # type: ignore[no-untyped-call]
    else:
        content_type = b"text/plain; version=0.0.4; charset=utf-8"
        body = generate_latest(collector)
    headers = [(b"content-type", content_type), (b"vary", b"accept, accept-encoding")]
    if form.gzip:
        body = gzip.compress(body, GZIP_LEVEL, mtime=0)
        headers.append((b"content-encoding", b"gzip"))
    return Exposition(body, tuple(headers))


class _Collector:
    """The metrics of all processes, for prometheus_client."""

    def __init__(self, memory: MetricMemory, *, exemplars: bool) -> None:
        self._memory, self._exemplars = memory, exemplars

    def collect(self) -> Iterator[Metric]:
        yield from self._of_processes()
        newest = self._read_exemplars() if self._exemplars else {}
        for metric in self._of_regions():
            if metric.name == WITH_EXEMPLARS and newest:
                metric.samples = [
                    sample._replace(exemplar=newest.get(frozenset(sample.labels.items()))) for sample in metric.samples
                ]
            yield metric

    def _of_regions(self) -> Iterable[Metric]:
        from prometheus_client import Metric
        from prometheus_client.multiprocess import MultiProcessCollector

        metrics: dict[str, Metric] = {}
        for region in self._memory.regions:
            for series in (region.lasting, region.live):
                for key, value in series.read():
                    kind, mode, metric_name, name, labels, help_ = _decode(key)
                    metric = metrics.get(metric_name)
                    if metric is None:
                        metric = metrics[metric_name] = Metric(metric_name, help_, kind)
                        metric._multiprocess_mode = mode  # type: ignore[attr-defined]
                    metric.add_sample(name, tuple(sorted(labels.items())), value)  # type: ignore[arg-type]
        # Sums, maxima and cumulative buckets, as the library computes them from its own files.
        return MultiProcessCollector._accumulate_metrics(metrics, accumulate=True)  # type: ignore[no-untyped-call,no-any-return]

    def _of_processes(self) -> Iterable[Metric]:
        """Returns the `process_…` metrics of all Prometheus clients, with the label `process`."""
        from prometheus_client import ProcessCollector

        together: dict[str, Metric] = {}
        for region in sorted(self._memory.regions, key=lambda region: region.name):
            with contextlib.suppress(OSError):  # the process has just died
                if not (pid := region.pid):
                    continue
                for family in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():  # type: ignore[misc]
                    if family.name in SKIPPED_METRICS:
                        continue
                    samples = [sample._replace(labels={"process": region.name}) for sample in family.samples]
                    family.samples = together[family.name].samples + samples if family.name in together else samples
                    together[family.name] = family
        return together.values()

    def _read_exemplars(self) -> dict[frozenset[tuple[str, str]], Exemplar]:
        """Returns the newest exemplars of all processes, by the labels of their bucket."""
        from prometheus_client.samples import Exemplar

        newest: dict[frozenset[tuple[str, str]], ExemplarOf] = {}
        for data in filter(None, [region.exemplars for region in self._memory.regions]):
            for exemplar in msgspec.msgpack.decode(data, type=list[ExemplarOf]):
                key = frozenset(exemplar.labels.items())
                if key not in newest or newest[key].time < exemplar.time:
                    newest[key] = exemplar
        return {key: Exemplar({each.kind: each.id}, each.value, each.time) for key, each in newest.items()}


_Key = tuple[str, str, str, str, dict[str, str], str]  # type, mode, metric, name, labels, help
_decoder: msgspec.json.Decoder[_Key] = msgspec.json.Decoder(_Key)


@lru_cache(maxsize=100_000)
def _decode(key: bytes) -> _Key:
    return _decoder.decode(key)


PUBLISH_INTERVAL_S = 1.0
MAX_CHARACTERS = 128  # of an exemplar's label and its value: OpenMetrics' limit


class ExemplarOf(msgspec.Struct, array_like=True):
    """Exemplar of one bucket of a histogram."""

    labels: dict[str, str]  # of the bucket, with `le`
    kind: str  # trace_id or request_id
    id: str
    value: float
    time: float  # Unix time

    @property
    def fits(self) -> bool:
        """True if it is short enough for a scrape."""
        return len(self.kind) + len(self.id) <= MAX_CHARACTERS


async def publish(region: Region, take: Callable[[], list[ExemplarOf]]) -> NoReturn:
    """Publishes the result of `take` each time it changes."""
    written = b""
    while True:
        data = msgspec.msgpack.encode(take())
        if data != written:
            region.put_exemplars(data)
            written = data
        await asyncio.sleep(PUBLISH_INTERVAL_S)


class Scrapes:
    """Serves the scrapes of one HTTP process without blocking its event loop.

    Reading every process's file takes tens of milliseconds. One thread does it, once for all scrapes that wait for the
    same form.
    """

    def __init__(self, memory: MetricMemory, write: Callable[[], None]) -> None:
        """`write` publishes the metrics of this process; it runs on the event loop."""
        self._memory, self._write = memory, write
        self._thread = ThreadPoolExecutor(1, "scrape")
        self._lock = asyncio.Lock()
        self._next: dict[Form, asyncio.Task[Exposition]] = {}

    async def render(self, form: Form) -> Exposition:
        """Returns the current metrics of all processes."""
        waiting = self._next.get(form)
        if waiting is None:
            waiting = self._next[form] = asyncio.create_task(self._collect(form))
        return await asyncio.shield(waiting)  # others may wait for it after this client has disconnected

    async def _collect(self, form: Form) -> Exposition:
        async with self._lock:
            del self._next[form]  # a later scrape must see what happens from now on
            self._write()
            return await asyncio.get_running_loop().run_in_executor(self._thread, exposition, self._memory, form)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
