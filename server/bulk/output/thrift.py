"""Thrift's compact protocol, in which Parquet writes its footers: bytes to values, and back.

A struct is a dict: field → (type, value). Fields that nobody here knows come back as they were read.
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

from typing import Any

__all__ = ["Struct", "read_struct", "write_struct"]

Struct = dict[int, tuple[int, Any]]

_TRUE, _FALSE, _BYTE, _I16, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 4, 6, 7, 8, 9, 10, 12
_INTEGERS = range(_I16, _I64 + 1)
_LONG = 15  # a list's size that follows as a number of its own


def read_struct(data: bytes) -> Struct:
    """The struct that `data` begins with. Raises ValueError or IndexError for what is none."""
    return _Reader(data).struct()


def write_struct(struct: Struct) -> bytes:
    """The bytes of a struct."""
    out = bytearray()
    _write_struct(out, struct)
    return bytes(out)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def struct(self) -> Struct:
        fields: Struct = {}
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._zigzag()
            kind = head & 15
            fields[field] = kind, kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in _INTEGERS:
            return self._zigzag()
        if kind == _BINARY:
            return self._bytes(self._varint())
        if kind == _STRUCT:
            return self.struct()
        if kind in (_LIST, _SET):
            head = self._byte()
            size = head >> 4 if head >> 4 != _LONG else self._varint()
            return head & 15, [self._value(head & 15) for _ in range(size)]
        if kind == _DOUBLE:
            return self._bytes(8)
        if kind in (_TRUE, _FALSE, _BYTE):  # of a list
            return self._byte()
        raise ValueError(f"Thrift type {kind}")

    def _bytes(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        return self._data[start : self._at]

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
        return value | byte << shift

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)


def _write_struct(out: bytearray, struct: Struct) -> None:
    before = 0
    for field, (kind, value) in struct.items():
        if kind in (_TRUE, _FALSE):
            kind = _TRUE if value else _FALSE
        if 0 < field - before < 16:
            out.append(field - before << 4 | kind)
        else:
            out.append(kind)
            _write_zigzag(out, field)
        before = field
        if kind not in (_TRUE, _FALSE):
            _write_value(out, kind, value)
    out.append(0)


def _write_value(out: bytearray, kind: int, value: Any) -> None:
    if kind in _INTEGERS:
        _write_zigzag(out, value)
    elif kind == _BINARY:
        _write_varint(out, len(value))
        out += value
    elif kind == _STRUCT:
        _write_struct(out, value)
    elif kind in (_LIST, _SET):
        of, values = value
        out.append((min(_LONG, len(values))) << 4 | of)
        if len(values) >= _LONG:
            _write_varint(out, len(values))
        for each in values:
            _write_value(out, of, each)
    elif kind == _DOUBLE:
        out += value
    elif kind in (_TRUE, _FALSE, _BYTE):
        out.append(value)
    else:
        raise ValueError(f"Thrift type {kind}")


def _write_varint(out: bytearray, value: int) -> None:
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def _write_zigzag(out: bytearray, value: int) -> None:
    _write_varint(out, value << 1 if value >= 0 else (-value << 1) - 1)
