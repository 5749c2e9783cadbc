"""The definition of every metric, but for those of requests (http_metrics.py).

All processes write to memory that they share (metric_memory.py), and each of them can serve `/metrics` for all.
A process calls `use_memory` before it creates its metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import msgspec

from embert.server.observability.metric_memory import MetricMemory, Region, value_class

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from prometheus_client import Counter, Gauge
    from prometheus_client.metrics import MetricWrapperBase

SeriesT = TypeVar("SeriesT", bound="MetricWrapperBase")

REJECT_REASONS = ("queue_full", "too_large", "deadline", "draining", "loading", "connections", "memory", "unauthorized")
CANCEL_STAGES = ("queued", "batched")
MODEL_FACTS = ("model", "model_id", "dtype", "backend", "device")
TEXT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_BATCH_TOKEN_BUCKETS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_RATIO_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
# Each bound is about twice the one before, so the error of a quantile is less than half. Every bound is a series for
# each set of labels, so each histogram has only the bounds between which its observations fall.
HOST_BUCKETS_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
REQUEST_BUCKETS_S = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip


def use_memory(memory: MetricMemory, process: str) -> Region:
    """Makes this process write new metrics to its region, where it continues those of a dead `process`."""
    from prometheus_client import values

    region = memory.region(process)
    region.begin()
    values.ValueClass = value_class(region, msgspec.json.encode)
    return region


def counter(name: str, help_: str, **labels: str) -> Counter:
    """Returns a series of `embert_NAME`, which ends in `_total`. It begins now, at zero."""
    from prometheus_client import Counter

    return _series(Counter(f"embert_{name}", help_, [*labels], registry=None), labels)


def gauge(name: str, help_: str, mode: str = "livesum", **labels: str) -> Gauge:
    """Returns a series of `embert_NAME`. `mode` selects how the numbers of several processes are combined."""
    from prometheus_client import Gauge

    family = Gauge(f"embert_{name}", help_, [*labels], registry=None, multiprocess_mode=mode)  # type: ignore[arg-type]
    return _series(family, labels)


def _series(family: SeriesT, labels: dict[str, str]) -> SeriesT:
    return family.labels(**labels) if labels else family


class BufferedHistogram:
    """A series of the histogram `embert_NAME`, which collects observations in a list and writes them together.

    One `Histogram.observe` costs 1.5 µs and a request makes eight observations: a tenth of its whole cost.
    """

    def __init__(self, name: str, help_: str, bounds: Sequence[float], **labels: str) -> None:
        """`bounds` of the buckets increase."""
        from prometheus_client import Histogram

        family = Histogram(f"embert_{name}", help_, [*labels], registry=None, buckets=bounds)
        self._histogram, self._bounds = _series(family, labels), bounds
        self._values: list[float] = []
        self.observe = self._values.append
        self.observe_many = self._values.extend

    def write(self) -> None:
        """Adds all collected values to their buckets and to the sum, as `Histogram.observe` does for one."""
        if not self._values:
            return
        import numpy as np  # not in the supervisor

        buckets = np.searchsorted(self._bounds, self._values)
        counts = np.bincount(buckets, minlength=len(self._bounds) + 1)
        for bucket in counts.nonzero()[0].tolist():
            self._histogram._buckets[bucket].inc(int(counts[bucket]))
        self._histogram._sum.inc(float(np.sum(self._values)))
        self._note(buckets)
        self._values.clear()

    def _note(self, buckets: npt.NDArray[np.intp]) -> None:
        """Hook for subclasses: `buckets` has the index of each value's bucket."""


class EngineMetrics:
    """Metrics of an engine process. A batch only appends to lists and adds to numbers, which `write` publishes."""

    WRITE_INTERVAL_S = 0.1

    def __init__(self, engine: int) -> None:
        self._engine = str(engine)
        self.models: dict[str, EngineModelMetrics] = {}  # by served name; `of` adds them
        busy_help = "Share of the last 5 seconds spent in forwards."
        self.busy_ratio = gauge("engine_busy_ratio", busy_help, engine=self._engine)
        self.last_success = 0.0  # Unix time; 0: none yet
        cancelled_help = "Texts whose client disconnected: queued ones did not run, batched ones ran in vain."
        self.cancelled_texts = {
            stage: counter("cancelled_texts_total", cancelled_help, stage=stage) for stage in CANCEL_STAGES
        }

    @cached_property
    def _last_success(self) -> Gauge:
        """Created with the first success. The series outlives the process until its replacement succeeds."""
        help_ = "Unix time of the last successful forward, including warm-up and idle probes."
        return gauge("engine_last_success_timestamp_seconds", help_, "max", engine=self._engine)

    def of(self, model: str) -> EngineModelMetrics:
        """Returns the series of a model on this engine, by its served name."""
        if model not in self.models:
            self.models[model] = EngineModelMetrics(self._engine, model)
        return self.models[model]

    def write_last_success(self) -> None:
        """Publishes the time of the last success; any thread may call this."""
        if self.last_success:
            self._last_success.set(self.last_success)

    def write(self) -> None:
        """Publishes all observations since the last call; only the device loop may call this."""
        self.write_last_success()
        for metrics in list(self.models.values()):
            metrics.write()

    def describe(self, facts: dict[str, str]) -> None:
        """Exports the description of a model; the keys are MODEL_FACTS."""
        info_help = "Always 1; the labels describe the model, whose served name is `model`."
        gauge("model_info", info_help, "livemax", **facts).set(1)


class EngineModelMetrics:
    """Metrics of one model on one engine."""

    def __init__(self, engine: str, model: str) -> None:
        labels = {"engine": engine, "model": model}
        self._batches = counter("batches_total", "Batches run.", **labels)
        self._busy = counter("engine_busy_seconds_total", "Time in which a batch ran on the encoder.", **labels)
        self.batch_duration = BufferedHistogram(
            "batch_duration_seconds", "One batch on the encoder.", REQUEST_BUCKETS_S, **labels
        )
        self.batch_texts = BufferedHistogram("batch_texts", "Texts of one batch.", TEXT_BUCKETS, **labels)
        self.batch_tokens = BufferedHistogram("batch_tokens", "Tokens of one batch.", _BATCH_TOKEN_BUCKETS, **labels)
        fill_help = "Tokens of one batch ÷ the token budget; long texts count more than their tokens."
        self.fill_ratio = BufferedHistogram("batch_token_fill_ratio", fill_help, _RATIO_BUCKETS, **labels)
        padding_help = "Padding tokens computed; 0, because batches are packed."
        self.padding_tokens = counter("padding_tokens_total", padding_help, **labels)
        self.queue_texts = gauge("queue_texts", "Texts waiting for a batch.", model=model)
        tokens_help = "Tokens waiting for a batch; long texts count more than their tokens. Scale replicas on this."
        self.queue_tokens = gauge("queue_tokens", tokens_help, model=model)
        self.batches = 0  # since the last `write`, as is `busy_s`
        self.busy_s = 0.0

    def write(self) -> None:
        """Publishes all but the gauges."""
        self._batches.inc(self.batches)
        self._busy.inc(self.busy_s)
        self.batches, self.busy_s = 0, 0.0
        for histogram in (self.batch_duration, self.batch_texts, self.batch_tokens, self.fill_ratio):
            histogram.write()


GPU_METRICS = {
    "memory_bytes": "GPU memory in use by all processes.",
    "memory_limit_bytes": "Memory of the GPU.",
    "utilization_ratio": "Share of the driver's last sample, up to a second, in which a kernel ran.",
    "power_watts": "Power draw of the GPU.",
}


def gpu_gauge(name: str, device: str) -> Gauge:
    """Returns the gauge of one of GPU_METRICS. One without a value from this GPU is omitted."""
    return gauge(f"gpu_{name}", GPU_METRICS[name], "livemax", device=device)


class SpanMetrics:
    """Metrics of processes that export spans. The supervisor creates them too, so that they always exist."""

    def __init__(self) -> None:
        self.exported = counter("spans_exported_total", "Spans that the collector accepted.")
        dropped_help = "Spans that were dropped: the collector did not accept them, or too many waited for it."
        self.dropped = counter("spans_dropped_total", dropped_help)


class SupervisorMetrics:
    """Metrics of the supervisor."""

    def __init__(self, models: Sequence[str], version: str) -> None:
        """Creates the metrics of models with these names, all at zero."""
        gauge("build_info", "Always 1; the label is the version.", "livemax", version=version).set(1)
        ready_help = "1 while an engine is ready for the model, else 0; a download included."
        self.model_ready = {name: gauge("model_ready", ready_help, "livemax", model=name) for name in models}
        starting_help = "1 from the start until the server was ready once, for --start-timeout at most."
        self.starting = gauge("starting", starting_help, "livemax")
        self.starting.set(1)
        self.draining = gauge("draining", "1 after SIGTERM, while requests in flight complete.", "livemax")
        self._http_restarts = counter("http_restarts_total", "Restarts of HTTP processes.")
        old_help = "Deprecated: the same as embert_http_restarts_total, until the next release."
        self._api_restarts = counter("api_restarts_total", old_help)
        hangs_help = "Processes that hung and were killed."
        self.hangs = {kind: counter("hung_processes_total", hangs_help, process=kind) for kind in ("http", "engine")}
        SpanMetrics()
        self.engine_up: dict[int, Gauge] = {}
        self.hang_limit: dict[int, Gauge] = {}
        self.engine_restarts: dict[int, Counter] = {}

    def count_http_restart(self) -> None:
        self._http_restarts.inc()
        self._api_restarts.inc()

    def add_engines(self, engines: Sequence[int]) -> None:
        """Creates the metrics of these engines, all at zero."""
        limit_help = "A forward that takes longer counts as hung, and the engine is replaced; 0 until it is known."
        for i in engines:
            label = str(i)
            self.engine_up[i] = gauge("engine_up", "1 while the engine is ready, else 0.", "livemax", engine=label)
            self.hang_limit[i] = gauge("engine_hang_limit_seconds", limit_help, "livemax", engine=label)
            self.engine_restarts[i] = counter("engine_restarts_total", "Restarts of the engine process.", engine=label)
