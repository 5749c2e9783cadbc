"""The spans of requests, as a receiver of the protocol sees them."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.server.live import PATIENT, STAND_IN, Live, live, until
from tests.server.stand_in import HELD

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry's exporter is of the extra otel")
from tests.server.observability.tracing.otlp_receiver import OtlpReceiver, ReceivedSpan

GOOD, HOLD = [101, 7592, 102], [101, HELD, 102]
EMBED, OPENAI = "POST /embed", "POST /v1/embeddings"
STAGES = ("tokenize", "queue", "inference", "encode")
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
MARKER = "xyzzy-7f3a-marker"

CALLER = "b7ad6b7169203331"  # a span's id
AT_ONCE = {"OTEL_BSP_SCHEDULE_DELAY": "20"}  # milliseconds until spans leave
UNSAMPLED = {"OTEL_TRACES_SAMPLER": "parentbased_always_off"}
Pair = tuple[Live, OtlpReceiver]


@contextmanager
def traced(*options: str, env: Mapping[str, str] | None = None, **more: Any) -> Iterator[Pair]:
    """A stand-in's server that sends its spans to a receiver."""
    with (
        OtlpReceiver() as receiver,
        live(*STAND_IN, "--otlp-endpoint", receiver.url, *options, env=AT_ONCE | dict(env or {}), **more) as server,
    ):
        yield server, receiver


class Trace:
    """Headers that a caller sends, and the trace that it then looks for."""

    def __init__(self, *, sampled: bool = True) -> None:
        self.id = secrets.token_hex(16)
        self.headers = {"traceparent": f"00-{self.id}-{CALLER}-{int(sampled):02x}"}

    def spans(self, receiver: OtlpReceiver) -> list[ReceivedSpan]:
        return [span for span in receiver.spans if span.trace_id == self.id]


def received(receiver: OtlpReceiver, trace: Trace, names: Collection[str]) -> list[ReceivedSpan]:
    """The spans of a trace, once there are as many of each name as `names` has, and their batches' spans."""

    def complete() -> list[ReceivedSpan]:
        spans = trace.spans(receiver)
        if sorted(span.name for span in spans) != sorted(names):
            return []
        known = {span.span_id for span in receiver.spans}
        return spans if all(batch in known for span in spans for _, batch in span.links) else []

    return until(complete, what=f"the trace of {sorted(names)}")


def by_name(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    """The only one of this name."""
    (span,) = (span for span in spans if span.name == name)
    return span


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two HTTP processes. No request without a caller's span is sampled."""
    options = ("--max-batch-tokens", "256", "--workers", "2")
    with traced(*options, env=PATIENT | UNSAMPLED, clean_log=False) as (server, receiver):
        yield server, receiver


def ask(server: Live, ids: list[int] | list[list[int]], trace: Trace, **headers: str) -> httpx.Response:
    return server.post("/embed", {"inputs": ids}, headers=trace.headers | headers)


def within(inner: ReceivedSpan, outer: ReceivedSpan) -> bool:
    return outer.started <= inner.started <= inner.ended <= outer.ended


def test_a_request_is_a_tree_of_spans(pair: Pair) -> None:
    server, receiver = pair
    trace = Trace()
    headers = {"x-request-id": "r-1", "x-priority": "bulk", "tracestate": "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"}
    body = {"input": [f"{MARKER} one", "and two"], "model": MODEL}
    assert server.post("/v1/embeddings", body, headers=trace.headers | headers).status_code == 200
    spans = received(receiver, trace, (OPENAI, *STAGES))
    root = by_name(spans, OPENAI)
    assert root.is_server
    assert root.parent_id == CALLER
    tokens = root.attributes.pop("embert.tokens")
    assert tokens > 8
    assert root.attributes.pop("embert.process") in ("http-0", "http-1")
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/embeddings",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "url.path": "/v1/embeddings",
        "embert.model": MODEL,
        "embert.texts": 2,
        "embert.priority": "bulk",
        "embert.request_id": "r-1",
    }
    assert {span.state for span in spans} == {headers["tracestate"]}
    stages = [by_name(spans, name) for name in STAGES]
    assert {span.parent_id for span in stages} == {root.span_id}
    assert all(within(span, root) for span in stages)
    for before, after in itertools.pairwise(stages):
        assert before.ended <= after.started + 1_000_000  # nanoseconds; two processes each compare two clocks
    assert not any(span.failed or span.is_server for span in stages)
    inference = by_name(spans, "inference")
    assert inference.attributes == {"embert.texts": 2, "embert.tokens": tokens, "embert.engine": 0}
    (batch,) = (span for span in receiver.spans if [(span.trace_id, span.span_id)] == inference.links)
    assert (batch.name, batch.parent_id, batch.is_server) == ("batch", "", False)
    assert batch.links == [(trace.id, root.span_id)]
    assert batch.attributes == {
        "embert.engine": 0,
        "embert.batch.texts": 2,
        "embert.batch.tokens": tokens,
        "embert.batch.requests": 1,
    }
    assert (batch.started, batch.ended) == (inference.started, inference.ended)
    assert not any(MARKER.encode() in body for body in receiver.bodies)


def test_requests_of_one_batch_are_linked_from_its_span(pair: Pair) -> None:
    server, receiver = pair
    traces = [Trace(), Trace(), Trace(sampled=False)]
    holding = Trace(sampled=False)
    with ThreadPoolExecutor(4) as pool:
        with server.held() as runs:
            first = pool.submit(ask, server, HOLD, holding)
            until(runs.exists, what="the batch that the others wait for")
            asked = [pool.submit(ask, server, GOOD, trace) for trace in traces]
            until(lambda: server.metrics()["embert_queue_tokens"] == 9, what="the others in the queue")
        assert {future.result().status_code for future in (first, *asked)} == {200}
    found = [received(receiver, trace, (EMBED, *STAGES)) for trace in traces[:2]]
    inferences = [by_name(spans, "inference") for spans in found]
    assert inferences[0].links == inferences[1].links
    (batch,) = (span for span in receiver.spans if [(span.trace_id, span.span_id)] == inferences[0].links)
    roots = [by_name(spans, EMBED) for spans in found]
    assert sorted(batch.links) == sorted((root.trace_id, root.span_id) for root in roots)
    assert batch.attributes["embert.batch.requests"] == batch.attributes["embert.batch.texts"] == 3
    assert traces[2].spans(receiver) == holding.spans(receiver) == []
    assert all(by_name(spans, "queue").ended == batch.started for spans in found)


def test_a_deadline_that_passes_is_an_error(pair: Pair) -> None:
    server, receiver = pair
    trace, holding = Trace(), Trace(sampled=False)
    with ThreadPoolExecutor(1) as pool, server.held() as runs:
        first = pool.submit(ask, server, HOLD, holding)
        until(runs.exists, what="the batch that the other waits for")
        response = ask(server, GOOD, trace, **{"x-request-timeout": "3"})
        assert response.status_code == 503
        spans = received(receiver, trace, (EMBED, "tokenize", "queue"))
    assert first.result().status_code == 200
    root, queue = by_name(spans, EMBED), by_name(spans, "queue")
    assert root.attributes["http.response.status_code"] == 503
    assert root.attributes["error.type"] == "503"
    assert root.failed
    assert root.message == response.json()["error"]
    assert "was not served within 3 s" in root.message
    assert queue.failed
    assert queue.ended - queue.started > 0.1e9


def test_spans_do_not_hold_unknown_paths(pair: Pair) -> None:
    server, receiver = pair
    trace = Trace()
    assert server.post(f"/{MARKER}", {}, headers=trace.headers).status_code == 404
    (root,) = received(receiver, trace, ("POST",))
    assert root.attributes.keys() & {"http.route", "url.path"} == set()
    assert not any(MARKER.encode() in body for body in receiver.bodies)


def test_the_last_spans_leave_before_the_server_ends() -> None:
    """Though the exporter would wait a minute. Probes and scrapes have none."""
    trace = Trace()
    with traced(env={"OTEL_BSP_SCHEDULE_DELAY": "60000", **PATIENT}) as (server, receiver):
        for path in ("/livez", "/readyz", "/health", "/ping", "/metrics", "/info"):
            assert server.get(path).status_code == 200
        with ThreadPoolExecutor(1) as pool:
            with server.held() as runs:
                asked = pool.submit(ask, server, HOLD, trace)
                until(runs.exists, what="the batch")
                server.signal()
                until(lambda: "received SIGTERM" in server.log, what="the signal")
            assert asked.result().status_code == 200
        assert server.wait() == 0
        received(receiver, trace, (EMBED, *STAGES))
        assert {span.name for span in receiver.spans if span.is_server} == {EMBED, "GET /info"}
        assert "not take" not in server.log


def test_a_collector_that_hangs_costs_spans_and_nothing_else() -> None:
    def dropped() -> float:
        return server.metrics()["embert_spans_dropped_total"]

    env = {"OTEL_BSP_MAX_QUEUE_SIZE": "60", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "60"}
    with traced(env=env) as (server, receiver):
        receiver.responds.clear()
        with server.client() as client:
            for _ in range(40):  # three spans each in the HTTP process, two and a batch in the engine's
                assert client.post("/embed", json={"inputs": [[101, 102]]}).status_code == 200
        until(lambda: dropped() > 40, what="spans to be dropped")
        server.signal()
        assert server.wait() == 0  # though the exporter would wait ten seconds for this collector
        assert "did not accept the last spans" in server.log
