"""Servers that export traces, and the traces that arrive."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.live import STAND_IN, Live, live, until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry's exporter is of the extra otel")
from tests.server.observability.tracing.otlp_receiver import OtlpReceiver, ReceivedSpan

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = [
    "AT_ONCE",
    "CALLER",
    "OtlpReceiver",
    "ReceivedSpan",
    "Trace",
    "by_name",
    "new_trace",
    "received",
    "traced",
]

AT_ONCE = {"OTEL_BSP_SCHEDULE_DELAY": "20"}  # milliseconds until spans leave
CALLER = "b7ad6b7169203331"  # a span's id


@contextlib.contextmanager
def traced(*options: str, env: Mapping[str, str] | None = None, **more: Any) -> Iterator[tuple[Live, OtlpReceiver]]:
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


def new_trace(*, sampled: bool = True) -> Trace:
    return Trace(sampled=sampled)


def received(receiver: OtlpReceiver, trace: Trace, names: Collection[str]) -> list[ReceivedSpan]:
    """The spans of a trace, once there are as many of each name as `names` has, and their batches' spans."""

    def complete() -> list[ReceivedSpan]:
        spans = trace.spans(receiver)
        if sorted(span.name for span in spans) != sorted(names):
            return []
        known = {span.span_id for span in receiver.spans}
        return spans if all(batch in known for span in spans for _, batch in span.links) else []

    try:
        return until(complete, what="the trace")
    except AssertionError as error:
        error.add_note(f"there are {sorted(span.name for span in trace.spans(receiver))}, not {sorted(names)}")
        raise


def by_name(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    """The only one of this name."""
    (span,) = (span for span in spans if span.name == name)
    return span
