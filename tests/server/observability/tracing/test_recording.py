"""What HTTP and engine processes record, without a server: bounds, errors, and the trace's id in log lines."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from embert.server.frontend.routes import dialects_by_path, labels_by_path
from embert.server.http.errors import Unavailable
from embert.server.http.held_bytes import HeldBytes
from embert.server.http.request_metrics import RequestMetricsMiddleware
from embert.server.observability import logs
from embert.server.observability.api_metrics import ApiMetrics
from embert.server.observability.latency_buckets import LatencyBuckets
from embert.server.observability.tracing.batch_tracer import BatchTracer
from embert.server.observability.tracing.records import BatchRecord, Member, RequestRecord, Stage, decode
from embert.server.observability.tracing.request_trace import RequestTracer
from embert.server.observability.tracing.sender import MESSAGE_BYTES, WAITING_BYTES, RecordSender
from embert.server.observability.tracing.settings import Sampler

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MARKER = "xyzzy-7f3a-marker"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, RecordSender]]:
    """The exporting process's end, and a sender at the other."""
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with theirs:
        sender = RecordSender(ours.detach(), "api-7")
        yield theirs, sender
        sender._socket.close()


def messages(end: socket.socket) -> list[tuple[int, list[RequestRecord | BatchRecord]]]:
    """Of each message that waits: spans dropped before it, and its records."""
    found: list[tuple[int, list[RequestRecord | BatchRecord]]] = []
    while True:
        try:
            message = decode(end.recv(1 << 20, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return found
        assert message.process == "api-7"
        found.append((message.dropped, message.records))


def record(number: int, size: int = 100) -> BatchRecord:
    return BatchRecord(0, 0.0, 1.0, number, 1, 1, "", [Member(b"x" * size, 1, 1, 1.0)])


def numbers(received: list[tuple[int, list[RequestRecord | BatchRecord]]]) -> list[int]:
    return [each.texts for _, records in received for each in records]


def test_records_arrive_in_order_with_the_next_flush(ends: tuple[socket.socket, RecordSender]) -> None:
    end, sender = ends
    for number in range(5):
        sender.add(record(number))
    assert messages(end) == []
    sender.flush()
    (message,) = messages(end)
    assert numbers([message]) == [0, 1, 2, 3, 4]
    sender.flush()
    assert messages(end) == []


def test_many_records_leave_without_one(ends: tuple[socket.socket, RecordSender]) -> None:
    end, sender = ends
    for number in range(3000):
        sender.add(record(number))
        if number % 100 == 0:
            received = messages(end)
            if received:
                assert len(received) == 1
                assert sum(100 for _ in received[0][1]) < MESSAGE_BYTES
                return
    raise AssertionError("3000 records of 100 bytes are more than a message")


def test_what_cannot_be_sent_is_kept_and_then_dropped_and_counted(ends: tuple[socket.socket, RecordSender]) -> None:
    end, sender = ends
    total = 4 * WAITING_BYTES // 1000
    for number in range(total):
        sender.add(record(number, 1000))
    sender.flush()
    assert sender._bytes <= WAITING_BYTES
    received = messages(end)
    while True:
        sender.flush()
        if not (more := messages(end)):
            break
        received += more
    dropped = sum(count for count, _ in received)
    arrived = numbers(received)
    assert arrived == sorted(set(arrived))
    assert arrived[-1] == total - 1
    assert dropped == 3 * (total - len(arrived)) > 0  # a batch, a queue and an inference each


def test_nobody_at_the_other_end_costs_records(ends: tuple[socket.socket, RecordSender]) -> None:
    end, sender = ends
    end.close()
    for number in range(2000):
        sender.add(record(number))
    sender.flush()
    assert sender._bytes == 0


def test_a_batch_of_very_many_requests_is_several_records(ends: tuple[socket.socket, RecordSender]) -> None:
    end, sender = ends
    members = [Member(number.to_bytes(24), 1, 3, 0.0) for number in range(5000)]
    tracer = BatchTracer(sender, 3)
    received = []
    for start in range(0, len(members), 2500):
        tracer.record(
            members[start : start + 2500], started=1.0, ended=2.0, texts=2500, tokens=7500, requests=2500, reason="why"
        )
        tracer.flush()
        received += messages(end)
    records = [each for _, records in received for each in records if isinstance(each, BatchRecord)]
    assert [member for each in records for member in each.members] == members
    assert {(each.engine, each.texts, each.reason) for each in records} == {(3, 2500, "why")}
    tracer.record([], started=1.0, ended=2.0, texts=1, tokens=1, requests=1)
    tracer.flush()
    assert messages(end) == []


# --- the middleware ---


def ask(app: ASGIApp, sender: RecordSender, *, sampled: bool = True, path: str = "/embed") -> int:
    """The status of a request through the middleware, in a task of its own."""
    metrics = ApiMetrics(["/embed", "other"], LatencyBuckets(), tasks=["/embed"])
    tracer = RequestTracer(sender, Sampler(0.0), frozenset())
    middleware = RequestMetricsMiddleware(
        app, labels_by_path(), ["/embed"], dialects_by_path(), metrics, HeldBytes(1), tracer=tracer
    )
    header = f"00-{TRACE}-{SPAN}-{int(sampled):02x}".encode()
    scope = {"type": "http", "method": "POST", "scheme": "http", "path": path, "headers": [(b"traceparent", header)]}
    statuses: list[int] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    asyncio.run(middleware(scope, receive, send))
    tracer.flush()
    return statuses[0]


async def breaks(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError(f"a bug that quotes {MARKER}")


async def drains(scope: Scope, receive: Receive, send: Send) -> None:
    from embert.server.http.errors import send_error

    scope["embert.trace"].stage("tokenize", 1.0, 2.0, "x" * 10_000)
    await send_error(send, Unavailable("the server is shutting down " + "!" * 10_000), dialects_by_path()["/embed"])


def test_a_bug_is_an_error_with_the_exceptions_name(
    ends: tuple[socket.socket, RecordSender], caplog: pytest.LogCaptureFixture
) -> None:
    end, sender = ends
    assert ask(breaks, sender) == 500
    ((_, (found,)),) = messages(end)
    assert isinstance(found, RequestRecord)
    assert (found.status, found.exception, found.reason) == (500, "RuntimeError", "internal error; the log has more")
    assert MARKER not in str(found)
    assert (found.trace_id.hex(), found.parent_id.hex()) == (TRACE, SPAN)


def test_reasons_are_short(ends: tuple[socket.socket, RecordSender]) -> None:
    end, sender = ends
    assert ask(drains, sender) == 503
    ((_, (found,)),) = messages(end)
    assert isinstance(found, RequestRecord)
    assert found.reason.startswith("the server is shutting down !")
    assert len(found.reason) == len(found.stages[0].reason) == 512
    assert isinstance(found.stages[0], Stage)


@pytest.mark.parametrize("sampled", [True, False])
def test_log_lines_of_a_request_carry_its_trace(
    ends: tuple[socket.socket, RecordSender], monkeypatch: pytest.MonkeyPatch, sampled: bool
) -> None:
    """Also of one that is not sampled here: the caller's own log lines have the id."""
    _, sender = ends
    lines: list[tuple[str, str]] = []

    class Format(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((logs._Json("api-0").format(record), logs._Text("api-0").format(record)))

    root, handler = logging.getLogger(), Format()
    root.addHandler(handler)
    try:
        assert ask(breaks, sender, sampled=sampled) == 500
        logging.getLogger(__name__).warning("of no request")
        logging.getLogger(__name__).warning("of an engine's request", extra={"trace_id": "ab" * 16})
    finally:
        root.removeHandler(handler)
    parsed = [json.loads(line) for line, _ in lines]
    assert [line.get("trace_id") for line in parsed] == [TRACE, None, "ab" * 16]
    first, second, third = (text for _, text in lines)
    assert first.endswith(f" trace_id={TRACE}")
    assert second.endswith("of no request")
    assert third.endswith(f" trace_id={'ab' * 16}")
