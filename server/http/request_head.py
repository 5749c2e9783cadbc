"""What a request's line and headers must be, beyond what the parser checks (RFC 9112).

Clients send the same head again and again over a connection. `KnownHeads` keeps what was parsed and checked of one, so
that the next request with the same bytes costs a look-up in a dictionary instead of a callback for each header.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import httptools

from embert.server.http.errors import BadRequest

__all__ = ["PLAIN_KEY", "KnownHead", "KnownHeads", "check_headers", "split_target", "without_upgrade"]

Headers = list[tuple[bytes, bytes]]

_HEAD_END = b"\r\n\r\n"
_KNOWN_MAX = 1024  # heads
_KNOWN_BYTES = 2048  # of one
PLAIN_KEY = "embert.plain"  # in the scope of a request whose headers ask for nothing, so that they are not parsed
# A head with one of these is parsed every time: it asks for something, and its value may be another in each request.
_NEVER_KNOWN = frozenset((
    b"content-encoding", b"expect", b"traceparent", b"transfer-encoding", b"upgrade", b"x-priority", b"x-request-id",
    b"x-request-timeout",
))  # fmt: skip

# RFC 3986, host and port; an empty one is allowed where the target has none.
_HOST = re.compile(rb"(\[[0-9A-Za-z:.]+\]|[A-Za-z0-9\-._~%!$&'()*+,;=]*)(:[0-9]*)?")


@dataclass(frozen=True, slots=True)
class KnownHead:
    """A head of a POST request that keeps its connection open."""

    target: bytes
    path: bytes
    query: bytes
    headers: Headers  # to be copied
    body_bytes: int


class KnownHeads:
    """Heads by their bytes, without the end. Bounded."""

    def __init__(self) -> None:
        self._heads: dict[bytes, KnownHead] = {}

    def find(self, data: bytes) -> KnownHead | None:
        """The head of a request that `data` holds exactly."""
        end = data.find(_HEAD_END)
        head = self._heads.get(data[:end])
        return head if head is not None and len(data) == end + len(_HEAD_END) + head.body_bytes else None

    def learn(self, data: bytes, target: bytes, path: bytes, query: bytes, headers: Headers) -> None:
        """Keep the head at the start of `data`: of HTTP/1.1, checked, with all of its body behind it."""
        end = data.find(_HEAD_END)
        fields = dict(headers)
        body_bytes = len(data) - end - len(_HEAD_END)
        is_usual = data.startswith(b"POST ") and end <= _KNOWN_BYTES and fields.keys().isdisjoint(_NEVER_KNOWN)
        if not is_usual or fields.get(b"content-length") != b"%d" % body_bytes:
            return
        if len(self._heads) >= _KNOWN_MAX:
            self._heads.clear()
        self._heads[data[:end]] = KnownHead(target, path, query, [*headers], body_bytes)


def check_headers(method: bytes, version: str, headers: Headers) -> None:
    """Raise BadRequest where method, version, `Host` or `Transfer-Encoding` cannot be taken."""
    if version not in ("1.1", "1.0"):
        raise BadRequest(f"HTTP/1.1 and HTTP/1.0 are spoken here; this request is HTTP/{version}")
    if method == b"CONNECT":
        raise BadRequest("CONNECT is for proxies, which this server is not")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise BadRequest(f"an HTTP/1.1 request must have one `Host`; this one has {len(hosts)}")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise BadRequest("`Host` must be a host, and perhaps a port")
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings and [value.lower() for value in codings] != [b"chunked"]:
        raise BadRequest("`Transfer-Encoding` can be `chunked`, once; this request has another")


def split_target(target: bytes) -> tuple[bytes, bytes]:
    """The path, still percent-encoded, and the query. Raises BadRequest where there is no path."""
    try:
        parsed = httptools.parse_url(target)
        path, query = parsed.path or b"/", parsed.query or b""
    except httptools.HttpParserInvalidURLError:
        path = query = b""
    if not path or not path.isascii():
        raise BadRequest("the request's target must be a path, in ASCII")
    return path, query


def without_upgrade(method: bytes, target: bytes, version: str, headers: Headers) -> bytes:
    """The head of a request that asks for another protocol, rewritten so that it does not.

    RFC 9110 lets a server ignore `Upgrade`.
    """
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    for name, value in headers:
        new_value = value
        if name == b"connection":
            tokens = [token.strip() for token in value.split(b",")]
            new_value = b", ".join(token for token in tokens if token.lower() != b"upgrade")
        if name != b"upgrade" and (new_value or not value):
            lines.append(name + b": " + new_value)
    return b"\r\n".join([*lines, b"", b""])
