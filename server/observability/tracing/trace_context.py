"""W3C Trace Context: the headers `traceparent` and `tracestate` (https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["SPAN_BYTES", "STATE_MAX", "TRACE_BYTES", "Parent", "read_parent"]

TRACE_BYTES, SPAN_BYTES = 16, 8  # of their ids
STATE_MAX = 512  # bytes of `tracestate`; the specification asks for no more, and clients write it

_SAMPLED = 1  # of the flags
_TRACEPARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Parent:
    """The span of the caller."""

    trace_id: bytes  # [TRACE_BYTES]
    span_id: bytes  # [SPAN_BYTES]
    sampled: bool
    state: bytes  # `tracestate`; empty: none, or one that is too long


def read_parent(headers: Sequence[tuple[bytes, bytes]]) -> Parent | None:
    """The caller's span, from the headers of a request. None without a valid `traceparent`, as the specification says.

    The members of `tracestate` are not checked here.
    """
    found = [value for name, value in headers if name == b"traceparent"]
    if len(found) != 1 or (match := _TRACEPARENT.fullmatch(found[0])) is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == b"00" and more is not None:
        return None
    state = b",".join(value for name, value in headers if name == b"tracestate")
    if len(state) > STATE_MAX:
        state = b""
    return Parent(
        bytes.fromhex(trace_id.decode()), bytes.fromhex(span_id.decode()), bool(int(flags, 16) & _SAMPLED), state
    )
