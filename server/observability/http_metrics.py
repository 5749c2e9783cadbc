"""The metrics of HTTP processes, all written on the event loop.

A request only appends to lists and adds to numbers. `write` publishes them ten times a second, and before every scrape
that this process serves.

A series begins with its first observation, except those that every served model has: the values of labels multiply, and
few servers get low-priority requests, or requests on more than a few routes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from prometheus_client.utils import floatToGoString

from embert.server.observability.metrics import (
    HOST_BUCKETS_S,
    REJECT_REASONS,
    REQUEST_BUCKETS_S,
    BufferedHistogram,
    counter,
    gauge,
    histogram,
)
from embert.server.observability.request_record import EXPIRED, INTERACTIVE, OUTCOMES, RequestRecord, outcome_of
from embert.server.observability.scraping import ExemplarOf

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from prometheus_client import Counter, Histogram

_TEXT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_TOKEN_BUCKETS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_LABELS = ["model", "priority"]
# Their series begin, at zero, with the first request of a route to a model: a rate omits the first value of a series.
_ERRORS = ((424, ""), (429, ""), (500, ""), (503, ""), (503, EXPIRED))

HistogramT = TypeVar("HistogramT", bound=BufferedHistogram)


class RequestHistogram(BufferedHistogram):
    """A histogram that keeps the last request of each bucket."""

    def __init__(self, histogram: Histogram, bounds: Sequence[float]) -> None:
        super().__init__(histogram, bounds)
        self._records: list[RequestRecord] = []
        self.newest: dict[int, tuple[RequestRecord, float, float]] = {}  # by bucket: request, seconds, Unix time

    def observe_request(self, record: RequestRecord, seconds: float) -> None:
        """Adds the duration of a request."""
        self._values.append(seconds)
        self._records.append(record)

    def _note(self, buckets: npt.NDArray[np.intp]) -> None:
        now = time.time()
        for bucket, record, seconds in zip(buckets.tolist(), self._records, self._values, strict=True):
            self.newest[bucket] = record, seconds, now
        self._records.clear()


class HttpMetrics:
    """The metrics of one HTTP process."""

    WRITE_INTERVAL_S = 0.1

    def __init__(
        self,
        routes: Sequence[str],
        *,
        tasks: Collection[str] = (),
        models: Sequence[str] = (),
        engines: int = 0,
    ) -> None:
        """`routes` are all values of that label, and `tasks` the routes that use a model.

        `models` are served names, whose series on this number of engines begin at the start.
        """
        self._families = _Families()
        self._work: dict[tuple[str, str], Work] = {}
        self._durations: dict[tuple[str, str, str, str], RequestHistogram] = {}
        requests_help = "HTTP requests by status; 499: the client disconnected before the response."
        self._requests = counter("requests_total", requests_help, ["route", *_LABELS, "status", "outcome"])
        self._responses: dict[tuple[str, str, str, int, str], _Responses] = {}  # by their labels
        self.requests_in_flight = 0
        self.ended = dict.fromkeys(OUTCOMES, 0)  # requests that used a model, until the last write
        self.queues: dict[str, tuple[int, int]] = {}  # by model: tokens admitted by this process, and the limit of all
        self.open_connections: Callable[[], int] = int  # 0 until set
        self.connections_limit = 0
        self.held_bytes = 0
        self._held = gauge("held_bytes", "Bytes of bodies, and of responses until clients have read them.")
        self._in_flight = gauge("requests_in_flight", "HTTP requests in progress, including this scrape.")
        self._admitted = gauge("admitted_tokens", "Tokens of admitted requests without a response.", ["model"])
        limit_help = "Limit of admitted tokens, which a low measured rate reduces; above it, 429."
        self._queue_limit = gauge("queue_limit_tokens", limit_help, ["model"], "livemax")  # the same in all processes
        self._connections = gauge("open_connections", "Connections that clients have open, idle ones included.")
        self._connections_limit = gauge(
            "connections_limit", "Limit of open connections of all HTTP processes; above it, 503 or closed at once."
        )
        rejected = counter("rejected_total", "Requests refused, by reason.", ["reason"])
        self.rejected = {reason: rejected.labels(reason) for reason in REJECT_REASONS}
        self.ignored_fields = counter("ignored_fields_total", "Request fields that were ignored; most are of no API.")
        self.unread_responses = counter("unread_answers_total", "Answers aborted because the client did not read them.")
        for route in routes:
            for model in models if route in tasks else ("",):
                self._count(route, model, INTERACTIVE if route in tasks else "", 200)
        for model in models:
            self.queues[model] = 0, 0
            work = self.work(model, INTERACTIVE)
            for engine in range(engines):
                work.on(engine)
        self.write()

    def work(self, model: str, priority: str) -> Work:
        """Returns the series of a served model's requests of one priority."""
        work = self._work.get((model, priority))
        if work is None:
            work = self._work[model, priority] = Work(self._families, model, priority)
        return work

    def count(self, route: str, status: int) -> None:
        """Counts a response to bytes that are not a request."""
        self._count(route, "", "", status).inc()

    def observe(self, record: RequestRecord, seconds: float) -> None:
        """Counts a request that has ended, and observes its parts."""
        key = record.route, record.model, record.priority, record.status, record.outcome
        responses = self._responses.get(key) or self._add_responses(*key)
        responses.new += 1
        responses.duration.observe_request(record, seconds)
        if responses.work is not None:
            responses.work.observe(record, seconds)

    def exemplars(self) -> list[ExemplarOf]:
        """Returns the last request of each bucket of durations, by its trace if it has one."""
        exemplars = []
        for (route, model, priority, outcome), histogram_ in self._durations.items():
            labels = {"route": route, "model": model, "priority": priority, "outcome": outcome}
            for bucket, (record, seconds, unix_time) in histogram_.newest.items():
                kind, id_ = ("trace_id", record.trace_id) if record.trace_id else ("request_id", record.id)
                le = self._families.duration_bounds[bucket]
                exemplars.append(ExemplarOf({**labels, "le": le}, kind, id_.decode(), seconds, unix_time))
        return [exemplar for exemplar in exemplars if exemplar.fits]

    def _add_responses(self, route: str, model: str, priority: str, status: int, outcome: str) -> _Responses:
        """Adds the series for the first request with these labels, and those of its errors, at zero."""
        if model:
            for error in _ERRORS:
                self._count(route, model, priority, *error)
        labels = route, model, priority, outcome or outcome_of(status)
        duration = self._durations.get(labels)
        if duration is None:
            duration = self._durations[labels] = self._families.duration(*labels)
        work = self.work(model, priority) if priority else None
        responses = _Responses(self._count(route, model, priority, status, outcome), duration, work, labels[-1])
        self._responses[route, model, priority, status, outcome] = responses
        return responses

    def _count(self, route: str, model: str, priority: str, status: int, outcome: str = "") -> Counter:
        """Returns the counter with these labels. Its series begins now, at zero."""
        return self._requests.labels(route, model, priority, str(status), outcome or outcome_of(status))

    def write(self) -> None:
        """Publishes all observations since the last call."""
        for work in self._work.values():
            work.write()
        for histogram_ in self._families.histograms:
            histogram_.write()
        for responses in self._responses.values():
            if responses.new:
                responses.counter.inc(responses.new)
                if responses.work is not None:
                    self.ended[responses.outcome] += responses.new
                responses.new = 0
        self._in_flight.set(self.requests_in_flight)
        for model, (admitted, limit) in self.queues.items():
            self._admitted.labels(model).set(admitted)
            self._queue_limit.labels(model).set(limit)
        self._connections.set(self.open_connections())
        self._connections_limit.set(self.connections_limit)
        self._held.set(self.held_bytes)


@dataclass(slots=True)
class _Responses:
    """Requests of one route, model and priority that ended with one status and outcome."""

    counter: Counter
    duration: RequestHistogram
    work: Work | None  # parts of their time; None: they use no model
    outcome: str
    new: int = 0  # since the last write


class Work:
    """The requests of one served model and priority. The parts of a request add up to its duration."""

    def __init__(self, families: _Families, model: str, priority: str) -> None:
        self._families, self._labels = families, (model, priority)
        self._tokenize = families.tokenize(model, priority)
        self._encode = families.encode(model, priority)
        self._other = families.other(model, priority)
        self._engines: dict[int, tuple[BufferedHistogram, BufferedHistogram]] = {}
        self.texts = self.tokens = self.truncated_texts = 0  # since the last write
        self._counters = families.counters(model, priority)
        # Without the priority, which the length of a text hardly depends on.
        self.request_texts, self.text_tokens = families.sizes(model)

    def on(self, engine: int) -> tuple[BufferedHistogram, BufferedHistogram]:
        """Returns the histograms of the time in the queue of an engine, and on the engine."""
        histograms = self._engines.get(engine)
        if histograms is None:
            histograms = self._engines[engine] = self._families.engine(*self._labels, str(engine))
        return histograms

    def observe(self, record: RequestRecord, seconds: float) -> None:
        """Observes the parts of a request's time, and the rest as `other`.

        Instances of `/vertex` run at the same time, so the sum of their parts can exceed the duration; it is then
        scaled to the duration.
        """
        parts = record.parts
        if parts is None:
            self._other.observe(seconds)
            return
        tokenize_s, queue_s, inference_s, encode_s = parts.tokenize_s, parts.queue_s, parts.inference_s, parts.encode_s
        known_s = tokenize_s + queue_s + inference_s + encode_s
        if known_s > seconds:
            scale = seconds / known_s
            tokenize_s, queue_s, inference_s, encode_s = (
                scale * part_s for part_s in (tokenize_s, queue_s, inference_s, encode_s)
            )
            known_s = seconds
        self._other.observe(seconds - known_s)
        if tokenize_s:
            self._tokenize.observe(tokenize_s)
        if parts.engine >= 0:
            queue, inference = self._engines.get(parts.engine) or self.on(parts.engine)
            queue.observe(queue_s)
            if inference_s:
                inference.observe(inference_s)
        if encode_s:
            self._encode.observe(encode_s)

    def write(self) -> None:
        """Publishes the counters."""
        for name, series in self._counters:
            if value := getattr(self, name):
                series.inc(value)
                setattr(self, name, 0)


class _Families:
    """The metrics with several series. `histograms` are those to write."""

    def __init__(self) -> None:
        self.histograms: list[BufferedHistogram] = []
        self._sizes: dict[str, tuple[BufferedHistogram, BufferedHistogram]] = {}
        duration_help = "From the request's headers to the end of its response."
        durations = histogram(
            "request_duration_seconds", duration_help, REQUEST_BUCKETS_S, ["route", *_LABELS, "outcome"]
        )
        self.duration = partial(self._make, RequestHistogram, durations, REQUEST_BUCKETS_S)
        bounds = (*REQUEST_BUCKETS_S, math.inf)
        self.duration_bounds: list[str] = [floatToGoString(bound) for bound in bounds]  # type: ignore[no-untyped-call]
        tokenize_help = "Tokenizing one request, including the wait for a thread."
        self.tokenize = self._maker("tokenize_duration_seconds", tokenize_help, HOST_BUCKETS_S, _LABELS)
        queue_help = "One request's wait for the encoder: before its first batch, and between its batches."
        self._queue = self._maker("queue_duration_seconds", queue_help, REQUEST_BUCKETS_S, [*_LABELS, "engine"])
        inference_help = "One request's time on the encoder: that of the batches with its texts."
        self._inference = self._maker(
            "inference_duration_seconds", inference_help, REQUEST_BUCKETS_S, [*_LABELS, "engine"]
        )
        encode_help = "From the vectors of one request to the body of its response."
        self.encode = self._maker("response_encode_duration_seconds", encode_help, HOST_BUCKETS_S, _LABELS)
        other_help = (
            "The rest of one request: reading and parsing its body, sockets, sending the response. "
            "With tokenize, queue, inference and encode, it adds up to the request's duration."
        )
        self.other = self._maker("request_other_duration_seconds", other_help, REQUEST_BUCKETS_S, _LABELS)
        self._texts = self._maker("request_texts", "Texts of one request.", _TEXT_BUCKETS, ["model"])
        self._tokens = self._maker("text_tokens", "Tokens of one text.", _TOKEN_BUCKETS, ["model"])
        self._counters = (
            ("texts", counter("texts_total", "Texts accepted.", _LABELS)),
            ("tokens", counter("tokens_total", "Tokens accepted, including special tokens.", _LABELS)),
            (
                "truncated_texts",
                counter("truncated_texts_total", "Texts truncated to the longest input of the model.", _LABELS),
            ),
        )

    def counters(self, *labels: str) -> list[tuple[str, Counter]]:
        """Returns the counters of one model and priority, with the names of their attributes of Work."""
        return [(name, family.labels(*labels)) for name, family in self._counters]

    def sizes(self, model: str) -> tuple[BufferedHistogram, BufferedHistogram]:
        """Returns the histograms of the texts of a request and of the tokens of a text."""
        if model not in self._sizes:
            self._sizes[model] = self._texts(model), self._tokens(model)
        return self._sizes[model]

    def engine(self, *labels: str) -> tuple[BufferedHistogram, BufferedHistogram]:
        """Returns the histograms of the time in the queue of an engine, and on the engine."""
        return self._queue(*labels), self._inference(*labels)

    def _maker(
        self, name: str, help_: str, bounds: Sequence[float], labels: Sequence[str]
    ) -> Callable[..., BufferedHistogram]:
        return partial(self._make, BufferedHistogram, histogram(name, help_, bounds, labels), bounds)

    def _make(self, kind: type[HistogramT], family: Histogram, bounds: Sequence[float], *labels: str) -> HistogramT:
        buffered = kind(family.labels(*labels), bounds)
        self.histograms.append(buffered)
        return buffered
