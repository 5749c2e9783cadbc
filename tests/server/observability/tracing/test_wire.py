"""What is written of the protocol is what opentelemetry-proto reads, field by field."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2", reason="OpenTelemetry's protocol is of the extra otel")
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, Status

from embert.server.observability.tracing.wire import SERVER, attribute, field, link, span

TRACE, ID, PARENT = b"t" * 16, b"s" * 8, b"p" * 8
STARTED, ENDED = 1_790_000_000_000_000_001, 2**64 - 1
LOCAL, REMOTE = 0x101, 0x301


def read(data: bytes) -> Span:
    found = ScopeSpans.FromString(data).spans
    assert len(found) == 1
    made: Span = found[0]
    return made


def written(name: str, *ids: Any, **more: Any) -> Span:
    return read(span(name, STARTED, ENDED, *ids, **more))


def test_a_span_without_a_parent() -> None:
    theirs = Span(
        trace_id=TRACE,
        span_id=ID,
        name="batch",
        kind=Span.SPAN_KIND_INTERNAL,
        flags=LOCAL,
        start_time_unix_nano=STARTED,
        end_time_unix_nano=ENDED,
    )
    assert written("batch", TRACE, ID) == theirs


def test_a_span_of_a_caller_with_all_there_is() -> None:
    theirs = Span(
        trace_id=TRACE,
        span_id=ID,
        parent_span_id=PARENT,
        trace_state="a=1,b=2",
        name="POST /ümlaut",
        kind=Span.SPAN_KIND_SERVER,
        flags=REMOTE,
        status=Status(code=Status.STATUS_CODE_ERROR, message="why"),
        attributes=[
            KeyValue(key="text", value=AnyValue(string_value="é" * 300)),
            KeyValue(key="number", value=AnyValue(int_value=-1)),
            KeyValue(key="truth", value=AnyValue(bool_value=True)),
        ],
        links=[
            Span.Link(trace_id=TRACE, span_id=PARENT, flags=LOCAL),
            Span.Link(trace_id=TRACE, span_id=ID, trace_state="c=3", flags=LOCAL),
        ],
        start_time_unix_nano=STARTED,
        end_time_unix_nano=ENDED,
    )
    more = attribute("text", "é" * 300) + attribute("number", -1) + attribute("truth", value=True)
    more += link(TRACE, PARENT) + link(TRACE, ID, "c=3")
    options = {"kind": SERVER, "is_remote": True, "failed": True, "reason": "why", "more": more}
    assert written("POST /ümlaut", TRACE, ID, PARENT, "a=1,b=2", **options) == theirs


def test_an_error_without_a_reason_is_one() -> None:
    assert written("batch", TRACE, ID, failed=True).status == Status(code=Status.STATUS_CODE_ERROR)


@pytest.mark.parametrize("size", [0, 127, 128, 16_383, 16_384, 3_000_000])
def test_a_field_of_any_length(size: int) -> None:
    assert Span.FromString(field(5, b"x" * size)).name == "x" * size


def test_spans_that_are_joined_are_of_one_scope() -> None:
    names = [f"s{number}" for number in range(3)]
    joined = b"".join(span(name, 1, 2, TRACE, ID) for name in names)
    assert [each.name for each in ScopeSpans.FromString(joined).spans] == names
