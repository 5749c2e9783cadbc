"""Collectors that hang, refuse or come back, and an exporting process that dies: requests notice none of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator

import psutil
import pytest

from tests.server.connections import connect
from tests.server.live import STAND_IN, Live, live, until
from tests.server.observability.tracing.traced import AT_ONCE, OtlpReceiver, new_trace, received, traced

REQUESTS = 10_000
PIPELINED = 50
BODY = b'{"inputs":[[101,7592,102]]}'
HEAD = b"POST /embed HTTP/1.1\r\nhost: x\r\naccept: application/octet-stream\r\nx-request-id: %b\r\n" % (b"r" * 128)
REQUEST = HEAD + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)  # the id makes many of them more than is kept
SPANS = 5  # of a request: POST /embed, tokenize, queue, inference, encode
TREE = ("POST /embed", "tokenize", "queue", "inference", "encode")
FEW = {"OTEL_BSP_MAX_QUEUE_SIZE": "600", "OTEL_EXPORTER_OTLP_TIMEOUT": "3"}
GROWTH_MB = 25  # the exporter's own: 600 spans, and what a failed connection leaves


def flood(server: Live, requests: int = REQUESTS) -> None:
    """So many requests, all of them answered with 200."""
    with connect(server) as sock, sock.makefile("rb") as answers:
        for _ in range(requests // PIPELINED):
            sock.sendall(REQUEST * PIPELINED)
            for _ in range(PIPELINED):
                assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
                length = 0
                while (line := answers.readline()) != b"\r\n":
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                answers.read(length)


def exporter(server: Live) -> psutil.Process:
    def running() -> list[psutil.Process]:
        children = psutil.Process(server.process.pid).children()
        return [each for each in children if "embert.server.observability.tracing.process" in each.cmdline()]

    (found,) = until(running, what="the exporting process")
    return found


def spans(server: Live) -> tuple[int, int]:
    """Exported, dropped."""
    metrics = server.metrics()
    return int(metrics["embert_spans_exported_total"]), int(metrics["embert_spans_dropped_total"])


def made(server: Live, requests: int) -> int:
    """How many spans so many requests have become, with those of their batches."""
    return SPANS * requests + int(server.metrics()['embert_batches_total{engine="0"}'])


def rss_mb(server: Live) -> list[float]:
    pids = [*server.api_pids, *server.engine_pids, exporter(server).pid]
    return [psutil.Process(pid).memory_info().rss / 1e6 for pid in pids]


@contextlib.contextmanager
def no_growth(server: Live) -> Iterator[None]:
    before = rss_mb(server)
    yield
    changes = zip(before, rss_mb(server), strict=True)
    assert [f"{old:.0f} → {new:.0f} MB" for old, new in changes if new - old > GROWTH_MB] == []


@pytest.fixture
def refusing() -> Iterator[str]:
    """A port that nobody listens on, and nobody else gets."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def test_a_collector_that_refuses_costs_spans_and_nothing_else(refusing: str) -> None:
    with live(*STAND_IN, "--otlp-endpoint", refusing, env=AT_ONCE | FEW) as server:
        flood(server, 1000)
        until(lambda: spans(server)[1], what="the first spans to be given up")
        with no_growth(server):
            flood(server)
        until(lambda: spans(server) == (0, made(server, REQUESTS + 1000)), what="all spans to be given up")
        assert server.log.count(f"{refusing}/v1/traces takes no spans, they are dropped until it does: ") == 1
        assert "refused" in server.log


def test_a_collector_that_hangs_costs_spans_and_nothing_else() -> None:
    with (
        OtlpReceiver() as receiver,
        live(*STAND_IN, "--otlp-endpoint", receiver.url, env=AT_ONCE | {"OTEL_BSP_MAX_QUEUE_SIZE": "600"}) as server,
    ):
        receiver.answers.clear()
        flood(server, 1000)
        with no_growth(server):
            flood(server)
        exported, dropped = spans(server)
        assert exported == 0
        assert dropped > SPANS * REQUESTS - 2 * 600
        server.signal()
        assert server.wait() == 0  # though the exporter would wait ten seconds more for this collector
        assert "the collector did not take the last spans in time, they are lost" in server.log


def test_a_collector_that_comes_back_gets_spans() -> None:
    with traced(env={"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}) as (server, receiver):
        receiver.status = 503
        flood(server, 100)
        until(lambda: spans(server)[1], what="spans to be given up")
        receiver.status = 200
        trace = new_trace()
        server.post("/embed", {"inputs": "a"}, headers=trace.headers)
        received(receiver, trace, TREE)
        until(lambda: sum(spans(server)) == made(server, 101), what="all spans to be counted")
        assert spans(server)[0] == receiver.count
        until(lambda: f"{receiver.url}/v1/traces takes spans again; " in server.log, what="the line about it")


def test_an_exporting_process_that_sleeps_holds_up_nobody() -> None:
    """What it has not read is kept for a while, then dropped, and all of it is counted."""
    with traced(env={"OTEL_BSP_MAX_QUEUE_SIZE": "100000"}) as (server, receiver):
        flood(server, 1000)
        until(lambda: spans(server) == (made(server, 1000), 0), what="the first spans")
        process = exporter(server)
        process.suspend()
        with no_growth(server):
            flood(server)
        process.resume()
        until(lambda: sum(spans(server)) == made(server, REQUESTS + 1000), what="all spans to be counted")
        exported, dropped = spans(server)
        assert dropped > 1000
        assert exported > SPANS * 1000
        assert exported == receiver.count


def test_an_exporting_process_that_dies_is_started_again() -> None:
    with traced() as (server, receiver):
        victim = exporter(server)
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
        trace = new_trace()
        assert server.post("/embed", {"inputs": "a"}, headers=trace.headers).status_code == 200
        received(receiver, trace, TREE)  # which the socket has kept
        assert "traces was killed by SIGKILL; starting it again in 0.1 s" in server.log
        assert server.is_ready()


def test_the_exporting_process_ends_with_a_supervisor_that_is_killed() -> None:
    with traced(status=None) as (server, _):
        process = exporter(server)
        server.signal(signal.SIGKILL)
        process.wait(60)
