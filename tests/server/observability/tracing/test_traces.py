"""The spans of requests, as a receiver of the protocol sees them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.live import PATIENT, Live, until
from tests.server.observability.tracing.traced import (
    CALLER,
    OtlpReceiver,
    ReceivedSpan,
    Trace,
    by_name,
    new_trace,
    received,
    traced,
)
from tests.server.stand_in import HELD

GOOD = [101, 7592, 102]
EMBED, OPENAI = "POST /embed", "POST /v1/embeddings"
STAGES = ("tokenize", "queue", "inference", "encode")
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
MARKER = "xyzzy-7f3a-marker"

UNSAMPLED = {"OTEL_TRACES_SAMPLER": "parentbased_always_off"}
Pair = tuple[Live, OtlpReceiver]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two HTTP processes. No request without a caller's span is sampled."""
    options = ("--max-batch-tokens", "256", "--workers", "2")
    with traced(*options, env=PATIENT | UNSAMPLED, clean_log=False) as (server, receiver):
        yield server, receiver


def order(number: int) -> list[int]:
    return [101, number, 102]


def ask(server: Live, ids: list[int] | list[list[int]], trace: Trace, **headers: str) -> httpx.Response:
    return server.post("/embed", {"inputs": ids}, headers=trace.headers | headers)


def within(inner: ReceivedSpan, outer: ReceivedSpan) -> bool:
    return outer.started <= inner.started <= inner.ended <= outer.ended


def test_a_request_is_a_tree_of_spans(pair: Pair) -> None:
    server, receiver = pair
    trace = new_trace()
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
    traces = [new_trace(), new_trace(), new_trace(sampled=False)]
    holding = new_trace(sampled=False)
    with ThreadPoolExecutor(4) as pool:
        with server.held() as runs:
            first = pool.submit(ask, server, order(HELD), holding)
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
    trace, holding = new_trace(), new_trace(sampled=False)
    with ThreadPoolExecutor(1) as pool, server.held() as runs:
        first = pool.submit(ask, server, order(HELD), holding)
        until(runs.exists, what="the batch that the other waits for")
        answer = ask(server, GOOD, trace, **{"x-request-timeout": "3"})
        assert answer.status_code == 503
        spans = received(receiver, trace, (EMBED, "tokenize", "queue"))
    assert first.result().status_code == 200
    root, queue = by_name(spans, EMBED), by_name(spans, "queue")
    assert root.attributes["http.response.status_code"] == 503
    assert root.attributes["error.type"] == "503"
    assert root.failed
    assert root.message == answer.json()["error"]
    assert "was not served within 3 s" in root.message
    assert queue.failed
    assert queue.ended - queue.started > 0.1e9


def test_paths_that_are_no_routes_are_not_told(pair: Pair) -> None:
    server, receiver = pair
    trace = new_trace()
    assert server.post(f"/{MARKER}", {}, headers=trace.headers).status_code == 404
    (root,) = received(receiver, trace, ("POST",))
    assert root.attributes.keys() & {"http.route", "url.path"} == set()
    assert not any(MARKER.encode() in body for body in receiver.bodies)


def test_the_last_spans_leave_before_the_server_ends() -> None:
    """Though the exporter would wait a minute. Probes and scrapes have none."""
    trace = new_trace()
    with traced(env={"OTEL_BSP_SCHEDULE_DELAY": "60000", **PATIENT}) as (server, receiver):
        for path in ("/livez", "/readyz", "/health", "/ping", "/metrics", "/info"):
            assert server.get(path).status_code == 200
        with ThreadPoolExecutor(1) as pool:
            with server.held() as runs:
                asked = pool.submit(ask, server, order(HELD), trace)
                until(runs.exists, what="the batch")
                server.signal()
                until(lambda: "received SIGTERM" in server.log, what="the signal")
            assert asked.result().status_code == 200
        assert server.wait() == 0
        received(receiver, trace, (EMBED, *STAGES))
        assert {span.name for span in receiver.spans if span.is_server} == {EMBED, "GET /info"}
        assert "not take" not in server.log
