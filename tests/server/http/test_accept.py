"""The media type that a client prefers."""

from __future__ import annotations

import pytest

from embert.server.http.errors import RequestError
from embert.server.http.request_head import MAX_BYTES, prefers

OCTETS, JSON = b"application/octet-stream", b"application/json"


RAW_ROWS = (
    b"application/octet-stream",
    b"Application/Octet-Stream ; Q=0.5",
    b"application/octet-stream, */*",
    b"application/json;q=0.9,application/octet-stream;q=0.91",
    b"application/json;q=0, */*",
    b"*/*;q=0, application/octet-stream;q=0.001",
)
OTHERS = (
    b"",
    b"*/*",
    b"application/json",
    b"application/json, application/octet-stream",
    b"application/octet-stream, application/json",
    b"application/octet-stream;q=0.5, application/json;q=0.5, */*;q=0.1",
    b"application/octet-stream;q=0",
    b"application/octet-stream;q=0.0, */*",
    b"application/json, application/octet-stream;q=0.9",
    b"application/octet-stream;q=-1",
    b"application/octet-stream;q=2",
    b"image/png",
    b'text/html;x="a, application/octet-stream", application/json',
    b'"application/octet-stream',
    b",;,",
)


@pytest.mark.parametrize("accept", RAW_ROWS + OTHERS)
def test_preference(accept: bytes) -> None:
    for values in ([accept], accept.split(b", ") if b'"' not in accept else [accept]):  # in one header, or in several
        assert prefers(OCTETS, JSON, values) is (accept in RAW_ROWS), values
    assert not prefers(OCTETS, JSON, [])


@pytest.mark.parametrize("values", [[b"a," * 32_000], [b"a"] * MAX_BYTES, [b"a" * MAX_BYTES]])
def test_what_would_take_long_to_parse_is_refused(values: list[bytes]) -> None:
    with pytest.raises(RequestError, match=f"`Accept`.*{MAX_BYTES}"):
        prefers(OCTETS, JSON, values)
