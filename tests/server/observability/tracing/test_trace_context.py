"""`traceparent` and `tracestate` as OpenTelemetry's own propagator reads them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from embert.server.observability.tracing.trace_context import STATE_MAX, Parent, read_parent

pytest.importorskip("opentelemetry.trace", reason="OpenTelemetry is not installed")
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def theirs(header: str) -> Parent | None:
    context = TraceContextTextMapPropagator().extract({"traceparent": header})
    span = trace.get_current_span(context).get_span_context()
    if not span.is_valid:
        return None
    return Parent(span.trace_id.to_bytes(16), span.span_id.to_bytes(8), span.trace_flags.sampled, b"")


hexadecimal = st.text("0123456789abcdefABCDEFg-", max_size=34)
near = st.builds(
    lambda *parts: "-".join(parts),
    st.sampled_from(["00", "01", "cc", "ff", "0", "000"]) | hexadecimal,
    st.sampled_from([TRACE, "0" * 32, TRACE[1:], TRACE.upper()]) | hexadecimal,
    st.sampled_from([SPAN, "0" * 16, SPAN[1:]]) | hexadecimal,
    st.sampled_from(["00", "01", "03", "ff", "1", "01-", "01-more"]) | hexadecimal,
)


@given(near)
@example(f"00-{TRACE}-{SPAN}-01")
@example(f"00-{TRACE}-{SPAN}-00")
@example(f"01-{TRACE}-{SPAN}-01-what-the-future-may-bring")
@example(f"00-{TRACE}-{SPAN}-01-more")
@example(f"00-{TRACE}-{SPAN}-01\n")
def test_traceparent_is_read_as_opentelemetry_reads_it(header: str) -> None:
    ours = read_parent([(b"host", b"x"), (b"traceparent", header.encode())])
    # Theirs allows spaces around it, which HTTP parsers remove.
    if header == header.strip():
        assert ours == theirs(header)


def test_two_are_none() -> None:
    header = b"traceparent", f"00-{TRACE}-{SPAN}-01".encode()
    assert read_parent([header]) is not None
    assert read_parent([header, header]) is None
    assert read_parent([]) is None


def test_states_of_several_headers_are_one() -> None:
    header = b"traceparent", f"00-{TRACE}-{SPAN}-01".encode()
    parent = read_parent([header, (b"tracestate", b"a=1"), (b"tracestate", b"b=2")])
    assert parent is not None
    assert parent.state == b"a=1,b=2"
    for length, kept in ((STATE_MAX, STATE_MAX), (STATE_MAX + 1, 0)):
        parent = read_parent([header, (b"tracestate", b"x" * length)])
        assert parent is not None
        assert len(parent.state) == kept
