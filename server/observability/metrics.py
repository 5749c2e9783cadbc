"""The definition of every metric.

All processes write into memory-mapped files of one folder, and any of them can answer `/metrics` for all.
`prometheus_client` reads PROMETHEUS_MULTIPROC_DIR when it is imported, so `use_folder` must run first.

Files are named by a process's role (`api-0`), not by its pid. A process that replaces a dead one continues its counters
and histograms, so totals lose nothing and files do not accumulate. `forget_process` removes the gauges of a dead one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram

__all__ = [
    "CANCEL_STAGES",
    "REJECT_REASONS",
    "ApiMetrics",
    "EngineMetrics",
    "GpuMetrics",
    "SupervisorMetrics",
    "exposition",
    "forget_process",
    "use_folder",
]

REJECT_REASONS = ("queue_full", "too_large", "deadline", "draining", "loading", "connections", "bodies")
CANCEL_STAGES = ("queued", "batched")
_TEXT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_TOKEN_BUCKETS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_BATCH_TOKEN_BUCKETS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_RATIO_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


def use_folder(folder: Path, process: str) -> None:
    """Make this process write its metrics to `folder`, and continue those of the last `process`, which must be dead.

    Must run before anything imports prometheus_client. `process` must not contain an underscore.
    """
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    from prometheus_client import values

    values.ValueClass = values.MultiProcessValue(lambda: process)  # type: ignore[no-untyped-call]


def exposition() -> tuple[bytes, str]:
    """The metrics of all processes: (text, content type)."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry), CONTENT_TYPE_LATEST


def forget_process(process: str) -> None:
    """Remove the gauges of a process that has died."""
    from prometheus_client.multiprocess import mark_process_dead

    mark_process_dead(process)  # type: ignore[no-untyped-call]


def _counter(name: str, help_: str, labels: Sequence[str] = ()) -> Counter:
    from prometheus_client import Counter

    return Counter(f"embert_{name}", help_, labels, registry=None)


def _gauge(name: str, help_: str, labels: Sequence[str] = (), mode: str = "livesum") -> Gauge:
    from prometheus_client import Gauge

    return Gauge(f"embert_{name}", help_, labels, registry=None, multiprocess_mode=mode)  # type: ignore[arg-type]


def _histogram(name: str, help_: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
    from prometheus_client import Histogram

    return Histogram(f"embert_{name}", help_, labels, registry=None, buckets=tuple(buckets))


class ApiMetrics:
    """Written by API processes, all on the event loop.

    Requests only append to lists and add to numbers. `write` publishes them ten times a second, and before every scrape
    that this process answers.
    """

    WRITE_INTERVAL_S = 0.1

    def __init__(self, routes: Sequence[str], latency_buckets: Sequence[float]) -> None:
        # Not at the top: it needs numpy, which the supervisor does without.
        from embert.server.observability.buffered_histogram import BufferedHistogram

        def latency(name: str, help_: str) -> BufferedHistogram:
            return BufferedHistogram(_histogram(name, help_, latency_buckets), latency_buckets)

        duration_help = "From the request's headers to the end of its answer."
        duration = _histogram("request_duration_seconds", duration_help, latency_buckets, ["route"])
        self.request_duration = {route: BufferedHistogram(duration.labels(route), latency_buckets) for route in routes}
        tokenize_help = "Tokenising one request, including the wait for a thread."
        self.tokenize_duration = latency("tokenize_duration_seconds", tokenize_help)
        encode_help = "From the vectors to the body of the answer."
        self.response_encode_duration = latency("response_encode_duration_seconds", encode_help)
        self.request_texts = BufferedHistogram(
            _histogram("request_texts", "Texts of one request.", _TEXT_BUCKETS), _TEXT_BUCKETS
        )
        self.text_tokens = BufferedHistogram(
            _histogram("text_tokens", "Tokens of one text.", _TOKEN_BUCKETS), _TOKEN_BUCKETS
        )
        self._histograms = [
            *self.request_duration.values(),
            self.tokenize_duration,
            self.response_encode_duration,
            self.request_texts,
            self.text_tokens,
        ]
        self.texts = self.tokens = self.truncated_texts = 0  # since the last write
        self.requests_in_flight = 0
        self.admitted_tokens = self.queue_limit = 0
        self._counters = [
            ("texts", _counter("texts_total", "Texts accepted.")),
            ("tokens", _counter("tokens_total", "Tokens accepted, including special tokens.")),
            (
                "truncated_texts",
                _counter("truncated_texts_total", "Texts truncated to the longest input of the model."),
            ),
        ]
        self._in_flight = _gauge("requests_in_flight", "HTTP requests in progress, including this scrape.")
        self._admitted = _gauge("admitted_tokens", "Tokens admitted and not yet answered.")
        limit_help = "Limit of admitted tokens, which a low measured rate reduces; above it, 429."
        self._queue_limit = _gauge("queue_limit_tokens", limit_help, mode="livemax")  # the same in all processes
        rejected = _counter("rejected_total", "Requests refused, by reason.", ["reason"])
        self.rejected = {reason: rejected.labels(reason) for reason in REJECT_REASONS}
        self.unread_answers = _counter("unread_answers_total", "Answers aborted because the client did not read them.")
        answered_help = "HTTP requests answered; status 499: the client disconnected first."
        self._requests = _counter("requests_total", answered_help, ["route", "status"])
        self._answers: dict[tuple[str, int], int] = {(route, 200): 0 for route in routes}
        for route, status in self._answers:
            self._requests.labels(route, str(status))
        self.write()

    def count(self, route: str, status: int) -> None:
        """Count an answer."""
        key = route, status
        self._answers[key] = self._answers.get(key, 0) + 1

    def write(self) -> None:
        """Publish everything that has been observed since the last call."""
        for histogram in self._histograms:
            histogram.write()
        for name, counter in self._counters:
            counter.inc(getattr(self, name))
            setattr(self, name, 0)
        for (route, status), answers in self._answers.items():
            if answers:
                self._requests.labels(route, str(status)).inc(answers)
                self._answers[route, status] = 0
        self._in_flight.set(self.requests_in_flight)
        self._admitted.set(self.admitted_tokens)
        self._queue_limit.set(self.queue_limit)


class EngineMetrics:
    """Written by engine processes."""

    def __init__(self, engine: int, latency_buckets: Sequence[float]) -> None:
        label = str(engine)
        self.queue_duration = _histogram(
            "queue_duration_seconds", "From admission to the start of a batch, per request and batch.", latency_buckets
        )
        self.inference_duration = _histogram("inference_duration_seconds", "One batch on the encoder.", latency_buckets)
        self.batches = _counter("batches_total", "Batches run.", ["engine"]).labels(label)
        self.batch_texts = _histogram("batch_texts", "Texts of one batch.", _TEXT_BUCKETS, ["engine"]).labels(label)
        self.batch_tokens = _histogram("batch_tokens", "Tokens of one batch.", _BATCH_TOKEN_BUCKETS, ["engine"]).labels(
            label
        )
        self.fill_ratio = _histogram(
            "batch_token_fill_ratio", "Tokens of one batch ÷ the token budget.", _RATIO_BUCKETS, ["engine"]
        ).labels(label)
        padding_help = "Padding tokens computed; 0, because batches are packed."
        self.padding_tokens = _counter("padding_tokens_total", padding_help, ["engine"]).labels(label)
        self.queue_texts = _gauge("queue_texts", "Texts waiting for a batch.")
        self.queue_tokens = _gauge("queue_tokens", "Tokens waiting for a batch; scale replicas on this.")
        self.busy_ratio = _gauge(
            "engine_busy_ratio", "Share of the last 5 seconds spent in forwards.", ["engine"]
        ).labels(label)
        self.last_success = _gauge(
            "engine_last_success_timestamp_seconds",
            "Unix time of the last successful forward, including warm-up and idle probes.",
            ["engine"],
            "mostrecent",
        ).labels(label)
        cancelled_help = "Texts whose client disconnected: queued ones did not run, batched ones ran in vain."
        cancelled = _counter("cancelled_texts_total", cancelled_help, ["stage"])
        self.cancelled_texts = {stage: cancelled.labels(stage) for stage in CANCEL_STAGES}
        info_help = "Always 1; the labels describe the model."
        self._model_info = _gauge("model_info", info_help, ["model", "dtype", "backend", "device"], "livemax")

    def add_model(self, model: str, dtype: str, backend: str, device: str) -> None:
        """A model is loaded."""
        self._model_info.labels(model, dtype, backend, device).set(1)


class GpuMetrics:
    """Written by engine processes on a GPU. A gauge for which this GPU reports no value is left out."""

    NAMES: ClassVar[dict[str, str]] = {
        "memory_bytes": "GPU memory in use by all processes.",
        "memory_limit_bytes": "Memory of the GPU.",
        "utilization_ratio": "Share of the driver's last sample, up to a second, in which a kernel ran.",
        "power_watts": "Power draw of the GPU.",
    }

    def __init__(self, device: str, names: Sequence[str]) -> None:
        self.gauges = {
            name: _gauge(f"gpu_{name}", self.NAMES[name], ["device"], "livemax").labels(device) for name in names
        }


@dataclass
class SupervisorMetrics:
    """Written by the supervisor."""

    engine_up: dict[int, Gauge]
    engine_restarts: dict[int, Counter]
    api_restarts: Counter
    hangs: Counter

    @classmethod
    def create(cls, engines: Sequence[int], version: str) -> SupervisorMetrics:
        """Metrics for these engines, all at zero."""
        up = _gauge("engine_up", "1 while the engine is ready, else 0.", ["engine"], "livemax")
        restarts = _counter("engine_restarts_total", "Restarts of the engine process.", ["engine"])
        _gauge("build_info", "Always 1; the label is the version.", ["version"], "livemax").labels(version).set(1)
        api_restarts = _counter("api_restarts_total", "Restarts of HTTP processes.")
        hangs = _counter("hung_processes_total", "Processes that hung and were killed.", ["process"])
        metrics = cls(
            {i: up.labels(str(i)) for i in engines},
            {i: restarts.labels(str(i)) for i in engines},
            api_restarts,
            hangs,
        )
        for kind in ("api", "engine"):
            hangs.labels(kind)
        for gauge in metrics.engine_up.values():
            gauge.set(0)
        return metrics
