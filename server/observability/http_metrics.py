"""The metrics of HTTP processes, all written on the event loop.

A request only appends to lists and adds to numbers. `write` publishes them ten times a second, and before every scrape
that this process serves.

A series begins with its first observation, except those that every served model has: the values of labels multiply, and
few servers get low-priority requests, or requests on more than a few routes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from prometheus_client.utils import floatToGoString

from embert.server.observability.metrics import (
    HOST_BUCKETS_S,
    REJECT_REASONS,
    REQUEST_BUCKETS_S,
    TEXT_BUCKETS,
    BufferedHistogram,
    counter,
    gauge,
)
from embert.server.observability.request_record import EXPIRED, INTERACTIVE, OUTCOMES, RequestRecord, outcome_of
from embert.server.observability.scraping import ExemplarOf

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from prometheus_client import Counter

_TOKEN_BUCKETS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Their series begin, at zero, with the first request of a route to a model: a rate omits the first value of a series.
_ERRORS = ((424, ""), (429, ""), (500, ""), (503, ""), (503, EXPIRED))
_DURATION_LABELS = [floatToGoString(bound) for bound in (*REQUEST_BUCKETS_S, math.inf)]  # type: ignore[no-untyped-call]


class RequestHistogram(BufferedHistogram):
    """The durations of some requests. Keeps the last request of each bucket."""

    def __init__(self, **labels: str) -> None:
        help_ = "From the request's headers to the end of its response."
        super().__init__("request_duration_seconds", help_, REQUEST_BUCKETS_S, **labels)
        self._labels = labels
        self._records: list[RequestRecord] = []
        self._newest: dict[int, tuple[RequestRecord, float, float]] = {}  # by bucket: request, seconds, Unix time

    def observe_request(self, record: RequestRecord, seconds: float) -> None:
        self._values.append(seconds)
        self._records.append(record)

    def _note(self, buckets: npt.NDArray[np.intp]) -> None:
        now = time.time()
        for bucket, record, seconds in zip(buckets.tolist(), self._records, self._values, strict=True):
            self._newest[bucket] = record, seconds, now
        self._records.clear()

    def exemplars(self) -> Iterator[ExemplarOf]:
        """Yields the last request of each bucket, by its trace if it has one."""
        for bucket, (record, seconds, unix_time) in self._newest.items():
            kind, id_ = ("trace_id", record.trace_id) if record.trace_id else ("request_id", record.id)
            labels = {**self._labels, "le": _DURATION_LABELS[bucket]}
            yield ExemplarOf(labels, kind, id_.decode(), seconds, unix_time)


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
        self._work: dict[tuple[str, str], Work] = {}
        self._durations: dict[tuple[str, str, str, str], RequestHistogram] = {}
        self._responses: dict[tuple[str, str, str, int, str], _Responses] = {}  # by their labels
        self.requests_in_flight = 0
        self.ended = dict.fromkeys(OUTCOMES, 0)  # requests that used a model, until the last write
        self.open_connections: Callable[[], int] = int  # 0 until set
        self.held = gauge("held_bytes", "Bytes of bodies, and of responses until clients have read them.")
        self._in_flight = gauge("requests_in_flight", "HTTP requests in progress, including this scrape.")
        admitted_help = "Tokens of admitted requests without a response."
        self.admitted = {name: gauge("admitted_tokens", admitted_help, model=name) for name in models}
        limit_help = "Limit of admitted tokens, which a low measured rate reduces; above it, 429."
        self.queue_limit = {  # the same in all processes
            name: gauge("queue_limit_tokens", limit_help, "livemax", model=name) for name in models
        }
        self._connections = gauge("open_connections", "Connections that clients have open, idle ones included.")
        self.connections_limit = gauge(
            "connections_limit", "Limit of open connections of all HTTP processes; above it, 503 or closed at once."
        )
        rejected_help = "Requests refused, by reason."
        self.rejected = {reason: counter("rejected_total", rejected_help, reason=reason) for reason in REJECT_REASONS}
        self.ignored_fields = counter("ignored_fields_total", "Request fields that were ignored; most are of no API.")
        self.unread_responses = counter("unread_answers_total", "Answers aborted because the client did not read them.")
        for route in routes:
            for model in models if route in tasks else ("",):
                _count(route, model, INTERACTIVE if route in tasks else "", 200)
        for model in models:
            work = self.work(model, INTERACTIVE)
            for engine in range(engines):
                work.on(engine)
        self.write()

    def work(self, model: str, priority: str) -> Work:
        """Returns the series of a served model's requests of one priority."""
        work = self._work.get((model, priority))
        if work is None:
            work = self._work[model, priority] = Work(model, priority)
        return work

    def count(self, route: str, status: int) -> None:
        """Counts a response to bytes that are not a request."""
        _count(route, "", "", status).inc()

    def observe(self, record: RequestRecord, seconds: float) -> None:
        """Counts a request that has ended, and observes its parts."""
        key = record.route, record.model, record.priority, record.status, record.outcome
        responses = self._responses.get(key) or self._add_responses(*key)
        responses.new += 1
        responses.duration.observe_request(record, seconds)
        if responses.work is not None:
            responses.work.observe(record, seconds)

    def exemplars(self) -> list[ExemplarOf]:
        """Returns the last request of each bucket of durations."""
        exemplars = chain.from_iterable(histogram.exemplars() for histogram in self._durations.values())
        return [exemplar for exemplar in exemplars if exemplar.fits]

    def _add_responses(self, route: str, model: str, priority: str, status: int, outcome: str) -> _Responses:
        """Adds the series for the first request with these labels, and those of its errors, at zero."""
        if model:
            for error in _ERRORS:
                _count(route, model, priority, *error)
        labels = route, model, priority, outcome or outcome_of(status)
        duration = self._durations.get(labels)
        if duration is None:
            duration = RequestHistogram(route=route, model=model, priority=priority, outcome=labels[-1])
            self._durations[labels] = duration
        work = self.work(model, priority) if priority else None
        responses = _Responses(_count(route, model, priority, status, outcome), duration, work, labels[-1])
        self._responses[route, model, priority, status, outcome] = responses
        return responses

    def write(self) -> None:
        for work in self._work.values():
            work.write()
        for duration in self._durations.values():
            duration.write()
        for responses in self._responses.values():
            if responses.new:
                responses.counter.inc(responses.new)
                if responses.work is not None:
                    self.ended[responses.outcome] += responses.new
                responses.new = 0
        self._in_flight.set(self.requests_in_flight)
        self._connections.set(self.open_connections())


def _count(route: str, model: str, priority: str, status: int, outcome: str = "") -> Counter:
    return counter(
        "requests_total",
        "HTTP requests by status; 499: the client disconnected before the response.",
        route=route,
        model=model,
        priority=priority,
        status=str(status),
        outcome=outcome or outcome_of(status),
    )


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

    def __init__(self, model: str, priority: str) -> None:
        self._labels = labels = {"model": model, "priority": priority}
        self._tokenize = BufferedHistogram(
            "tokenize_duration_seconds",
            "Tokenizing one request, including the wait for a thread.",
            HOST_BUCKETS_S,
            **labels,
        )
        encode_help = "From the vectors of one request to the body of its response."
        self._encode = BufferedHistogram("response_encode_duration_seconds", encode_help, HOST_BUCKETS_S, **labels)
        other_help = (
            "The rest of one request: reading and parsing its body, sockets, sending the response. "
            "With tokenize, queue, inference and encode, it adds up to the request's duration."
        )
        self._other = BufferedHistogram("request_other_duration_seconds", other_help, REQUEST_BUCKETS_S, **labels)
        # Without the priority, which the length of a text hardly depends on.
        self.request_texts = BufferedHistogram("request_texts", "Texts of one request.", TEXT_BUCKETS, model=model)
        self.text_tokens = BufferedHistogram("text_tokens", "Tokens of one text.", _TOKEN_BUCKETS, model=model)
        self._histograms = [self._tokenize, self._encode, self._other, self.request_texts, self.text_tokens]
        self._engines: dict[int, tuple[BufferedHistogram, BufferedHistogram]] = {}
        self.texts = self.tokens = self.truncated_texts = 0  # since the last write
        truncated_help = "Texts truncated to the longest input of the model."
        self._counters = {
            "texts": counter("texts_total", "Texts accepted.", **labels),
            "tokens": counter("tokens_total", "Tokens accepted, including special tokens.", **labels),
            "truncated_texts": counter("truncated_texts_total", truncated_help, **labels),
        }

    def on(self, engine: int) -> tuple[BufferedHistogram, BufferedHistogram]:
        """Returns the histograms of the time in the queue of an engine, and on the engine."""
        if engine not in self._engines:
            labels = {**self._labels, "engine": str(engine)}
            queue_help = "One request's wait for the encoder: before its first batch, and between its batches."
            queue = BufferedHistogram("queue_duration_seconds", queue_help, REQUEST_BUCKETS_S, **labels)
            inference_help = "One request's time on the encoder: that of the batches with its texts."
            inference = BufferedHistogram("inference_duration_seconds", inference_help, REQUEST_BUCKETS_S, **labels)
            self._engines[engine] = queue, inference
            self._histograms += queue, inference
        return self._engines[engine]

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
        for name, series in self._counters.items():
            if value := getattr(self, name):
                series.inc(value)
                setattr(self, name, 0)
        for histogram in self._histograms:
            histogram.write()
