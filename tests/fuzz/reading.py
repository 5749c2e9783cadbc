"""Reads a stream of bytes as HTTP/1.1 requests, by RFC 9112 and nothing else.

The judge compares responses with this. Where the RFC leaves the choice between refusing and one way to read on,
the request has a doubt and is read that way. Where it leaves none, the stream is broken, and nothing after that counts.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

HEAD_SIZE = 60_000  # bytes; the server's default limit is a little more
HEAD_LINES = 90
CHUNK_LINE_SIZE = 200  # bytes of a chunk's size and extensions
CHUNK_DIGITS = 15

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VERSION = re.compile(rb"HTTP/([0-9])\.([0-9])")
_VALUE = re.compile(rb"[\t -~\x80-\xff]*")
_HOST = re.compile(rb"[A-Za-z0-9\-._~!$&'()*+,;=%:\[\]]*")
_TARGET = re.compile(rb"[!-~]+")
_SECONDS = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_METHODS = {b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH"}


class End(enum.Enum):
    """The end of a stream."""

    CLEAN = "after a whole request"
    HEAD = "within a head"
    BODY = "within a body"
    BROKEN = "with what is not HTTP/1.1"
    LAST = "with a request after which the connection closes"


@dataclass(slots=True)
class Request:
    """One request, as far as the stream goes. Offsets are in bytes of the stream."""

    start: int
    method: str = "GET"
    target: str = ""
    head_end: int | None = None
    end: int | None = None
    request_id: bytes | None = None
    timeout_s: float | None = None
    must_close: bool = False
    may_close: bool = False
    doubts: tuple[str, ...] = ()

    def doubt(self, why: str) -> None:
        self.doubts = (*self.doubts, why)


@dataclass(frozen=True, slots=True)
class Reading:
    """The whole requests of a stream, and the one that is not whole."""

    requests: tuple[Request, ...]
    end: End
    tail: Request | None = None  # of HEAD, BODY and BROKEN
    why: str = ""  # of BROKEN


class _Broken(Exception):
    """A server must refuse this."""


class _Unfinished(Exception):
    """The stream ends here."""


def read(stream: bytes) -> Reading:
    """Read `stream` from its beginning."""
    requests: list[Request] = []
    position = 0
    while True:
        start, doubts = _skip_empty_lines(stream, position)
        if start == len(stream):
            return Reading(tuple(requests), End.CLEAN)
        request = Request(start, doubts=doubts)
        try:
            framing = _read_head(stream, request)
        except _Unfinished:
            return Reading(tuple(requests), End.HEAD, request)
        except _Broken as broken:
            return Reading(tuple(requests), End.BROKEN, request, str(broken))
        assert request.head_end is not None
        try:
            request.end = _read_body(stream, request.head_end, framing, request)
        except _Unfinished:
            return Reading(tuple(requests), End.BODY, request)
        except _Broken as broken:
            return Reading(tuple(requests), End.BROKEN, request, str(broken))
        requests.append(request)
        if request.must_close:
            return Reading(tuple(requests), End.LAST)
        position = request.end


def _skip_empty_lines(stream: bytes, position: int) -> tuple[int, tuple[str, ...]]:
    start = position
    while stream[start : start + 1] in (b"\r", b"\n"):  # each by itself, as llhttp and nginx skip them
        start += 1
    return start, () if stream[position:start] in (b"", b"\r\n") else ("empty lines before the request",)


def _line(stream: bytes, position: int, request: Request) -> tuple[bytes, int]:
    """The line that begins at `position` without its end, and where the next begins."""
    end = stream.find(b"\n", position)
    if end < 0:
        raise _Unfinished
    line = stream[position:end]
    if line.endswith(b"\r"):
        line = line[:-1]
    else:
        request.doubt("a line that ends with LF only")
    if b"\r" in line:
        request.doubt("a CR within a line")
        line = line.replace(b"\r", b" ")
    return line, end + 1


@dataclass(slots=True)
class _Framing:
    length: int | None = None
    chunked: bool = False


def _read_head(stream: bytes, request: Request) -> _Framing:
    line, position = _line(stream, request.start, request)
    minor = _read_request_line(line, request)
    fields: list[tuple[bytes, bytes]] = []
    while True:
        line, position = _line(stream, position, request)
        if not line:
            break
        if line[:1] in b" \t":
            request.doubt("a folded line")
            if fields:
                name, value = fields[-1]
                fields[-1] = name, (value + b" " + line.strip(b" \t")).strip(b" \t")
            continue
        fields.append(_field(line, request))
    request.head_end = position
    if position - request.start > HEAD_SIZE or len(fields) > HEAD_LINES:
        request.doubt("a long head")
    return _read_fields(fields, minor, request)


def _read_request_line(line: bytes, request: Request) -> int:
    words = line.split(b" ")
    if len(words) < 3:
        raise _Broken("a request line of fewer than three words")
    method, target, version = words[0], b" ".join(words[1:-1]), words[-1]
    found = _VERSION.fullmatch(version)
    if not found or not _TOKEN.fullmatch(method):
        raise _Broken("a request line without a method or a version")
    if found[1] != b"1":
        raise _Broken("another major version")
    minor = int(found[2])
    if minor > 1:
        request.doubt("an unknown minor version")
    if method not in _METHODS:
        request.doubt("an unusual method")
    if not _TARGET.fullmatch(target) or not (target.startswith(b"/") or (target == b"*" and method == b"OPTIONS")):
        request.doubt("an unusual target")
    request.method, request.target = method.decode("ascii"), target.decode("latin-1")
    return minor


def _field(line: bytes, request: Request) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon or not _TOKEN.fullmatch(name):
        raise _Broken("a header line without a name and a colon")
    if not _VALUE.fullmatch(value):
        request.doubt("a control character in a header")
    return name.lower(), value.strip(b" \t")


def _read_fields(fields: list[tuple[bytes, bytes]], minor: int, request: Request) -> _Framing:
    def values(name: bytes) -> list[bytes]:
        return [value for each, value in fields if each == name]

    def members(name: bytes) -> list[bytes]:
        return [
            item.strip(b" \t").lower() for value in values(name) for item in value.split(b",") if item.strip(b" \t")
        ]

    hosts = values(b"host")
    if len(hosts) > 1 or (not hosts and minor >= 1):
        raise _Broken("not one Host")
    if hosts and not _HOST.fullmatch(hosts[0]):
        request.doubt("an unusual Host")
    if any(value.lower() != b"100-continue" for value in values(b"expect")):
        request.doubt("an unknown expectation")
    if values(b"content-encoding"):
        request.doubt("an encoded body")
    connection = members(b"connection")
    request.must_close = b"close" in connection or (minor < 1 and b"keep-alive" not in connection)
    request.may_close = minor < 1
    request.request_id = next(iter(values(b"x-request-id")), None)
    if request.request_id is not None and not _REQUEST_ID.fullmatch(request.request_id):
        request.request_id = None
    seconds = values(b"x-request-timeout")
    if len(seconds) == 1 and _SECONDS.fullmatch(seconds[0]):
        request.timeout_s = float(seconds[0])
    framing = _Framing()
    lengths = values(b"content-length")
    if lengths:
        framing.length = _content_length(lengths, request)
    codings = members(b"transfer-encoding")
    if values(b"transfer-encoding"):
        if not codings:
            request.doubt("an empty Transfer-Encoding")
            return framing
        if codings[-1] != b"chunked" or codings.count(b"chunked") > 1:
            raise _Broken("a Transfer-Encoding that does not end with chunked")
        if len(codings) > 1:
            request.doubt("codings before chunked")
        framing.chunked = True
        if lengths or minor < 1:
            request.doubt("Transfer-Encoding with Content-Length or HTTP/1.0")
            request.must_close = True
    return framing


def _content_length(lengths: list[bytes], request: Request) -> int:
    numbers = [item.strip(b" \t") for value in lengths for item in value.split(b",")]
    if not all(number.isdigit() for number in numbers):
        raise _Broken("a Content-Length that is not a number")
    if len({number.lstrip(b"0") for number in numbers}) > 1:
        raise _Broken("several Content-Lengths")
    if len(numbers) > 1:
        request.doubt("the same Content-Length again")
    if len(numbers[0]) > 18:  # more than fits into 64 bits, perhaps
        request.doubt("a Content-Length of many digits")
    return int(numbers[0][-4000:])


def _read_body(stream: bytes, position: int, framing: _Framing, request: Request) -> int:
    """Returns the position after the body."""
    if not framing.chunked:
        end = position + (framing.length or 0)
        if end > len(stream):
            raise _Unfinished
        return end
    while size := _chunk_size(stream, position, request):
        length, position = size
        if length == 0:
            return _skip_trailers(stream, position, request)
        position += length
        after = stream[position : position + 2]
        if after == b"\r\n":
            position += 2
        elif after[:1] == b"\n":
            request.doubt("a chunk that ends with LF only")
            position += 1
        elif after in (b"", b"\r"):
            raise _Unfinished
        else:
            raise _Broken("a chunk that is longer than its size")
    raise _Unfinished


def _chunk_size(stream: bytes, position: int, request: Request) -> tuple[int, int]:
    stop = stream.find(b"\n", position)
    front = stream[position : stop if stop >= 0 else len(stream)]
    digits = re.match(rb"[0-9A-Fa-f]*", front)
    assert digits is not None
    number, rest = digits[0], front[digits.end() :]
    if not number and front:
        raise _Broken("a chunk without a size")
    if rest and rest[:1] not in b"; \t\r":
        raise _Broken("a chunk whose size is not a number")
    if b"\r" in rest[:-1]:
        raise _Broken("a CR within a chunk's first line")
    if len(front) > CHUNK_LINE_SIZE:
        request.doubt("a long chunk extension")
    if len(number) > CHUNK_DIGITS:
        request.doubt("a chunk size of many digits")
    if stop < 0:
        raise _Unfinished
    if not number:
        raise _Broken("a chunk without a size")
    if not rest.endswith(b"\r"):
        request.doubt("a chunk's first line that ends with LF only")
    extension = rest.removesuffix(b"\r")
    if extension and (not extension.startswith(b";") or not re.fullmatch(rb"(;[!-:<-~]+)+", extension)):
        request.doubt("an unusual chunk extension")
    return int(number, 16), stop + 1


def _skip_trailers(stream: bytes, position: int, request: Request) -> int:
    start = position
    while True:
        line, position = _line(stream, position, request)
        if position - start > HEAD_SIZE:
            request.doubt("long trailers")
        if not line:
            return position
        if line[:1] in b" \t":
            request.doubt("a folded trailer")
            continue
        _field(line, request)
        request.doubt("a trailer")
