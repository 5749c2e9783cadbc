"""Fields of the protocol's messages as bytes (https://protobuf.dev/programming-guides/encoding/).

Filling a `Span` of opentelemetry-proto and serialising it takes several times as long as joining these fields.
"""

from __future__ import annotations

import struct
from functools import lru_cache

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

__all__ = ["INTERNAL", "SERVER", "Value", "attribute", "field", "key_value", "link", "span"]

Value = str | int | bool

INTERNAL, SERVER = int(Span.SPAN_KIND_INTERNAL), int(Span.SPAN_KIND_SERVER)
# Of W3C's flags and OTLP's: sampled; it is known whether the parent is remote; it is.
_LOCAL, _REMOTE = 0x101, 0x301

_BYTES = 2  # the wire type of messages, strings and bytes
_SPANS = 2  # in a ScopeSpans
_SPAN_FLAGS = b"\x85\x01"  # the tags of fixed32 fields
_LINK_FLAGS = b"\x35"
_times = struct.Struct("<BQBQ").pack  # the start, tag 0x39, and the end, tag 0x41
_fixed32 = struct.Struct("<I").pack


def field(number: int, data: bytes) -> bytes:
    """A message, string or bytes as the field of this number, 1 … 15."""
    size, length = len(data), b""
    while size > 127:
        length += bytes((size & 127 | 128,))
        size >>= 7
    return b"%c%b%c%b" % (number << 3 | _BYTES, length, size, data)


def span(
    named: str,
    started_ns: int,
    ended_ns: int,
    trace_id: bytes,
    span_id: bytes,
    parent_id: bytes = b"",
    state: str = "",
    *,
    kind: int = INTERNAL,
    is_remote: bool = False,
    failed: bool = False,
    reason: str = "",
    more: bytes = b"",
) -> bytes:
    """A Span as a field of a ScopeSpans, in Unix nanoseconds; ids are [16], [8] and [8] bytes.

    `is_remote`: the parent is in another service. `more`: attributes and links.
    """
    data = b"\x0a\x10%b\x12\x08%b%b%b%b" % (
        trace_id,
        span_id,
        b"\x22\x08" + parent_id if parent_id else b"",
        _fixed(named, kind, is_remote),
        _times(0x39, started_ns, 0x41, ended_ns),
    )
    if state:
        data += field(3, state.encode())
    if failed:
        data += field(15, Status(code=Status.STATUS_CODE_ERROR, message=reason).SerializeToString())
    return field(_SPANS, data + more)


@lru_cache(1024)
def _fixed(name: str, kind: int, is_remote: bool) -> bytes:
    flags = _REMOTE if is_remote else _LOCAL
    return field(5, name.encode()) + b"\x30%c" % kind + _SPAN_FLAGS + _fixed32(flags)


def link(trace_id: bytes, span_id: bytes, state: str = "") -> bytes:
    """A link of a span to one of this server's."""
    data = b"\x0a\x10%b\x12\x08%b%b%b" % (trace_id, span_id, _LINK_FLAGS, _fixed32(_LOCAL))
    return field(13, data + field(3, state.encode()) if state else data)


def attribute(key: str, value: Value) -> bytes:
    """An attribute of a span."""
    return field(9, key_value(key, value).SerializeToString())


def key_value(key: str, value: Value) -> KeyValue:
    """An attribute of anything."""
    if isinstance(value, str):
        return KeyValue(key=key, value=AnyValue(string_value=value))
    if isinstance(value, bool):
        return KeyValue(key=key, value=AnyValue(bool_value=value))
    return KeyValue(key=key, value=AnyValue(int_value=value))
