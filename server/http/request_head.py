"""What a request's line and headers must be, beyond what the parser checks (RFC 9112)."""

from __future__ import annotations

import re

import httptools

from embert.server.http.errors import BadRequest

__all__ = ["check_headers", "split_target", "without_upgrade"]

Headers = list[tuple[bytes, bytes]]

# RFC 3986, host and port; an empty one is allowed where the target has none.
_HOST = re.compile(rb"(\[[0-9A-Za-z:.]+\]|[A-Za-z0-9\-._~%!$&'()*+,;=]*)(:[0-9]*)?")


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
        kept = value
        if name == b"connection":
            tokens = [token.strip() for token in value.split(b",")]
            kept = b", ".join(token for token in tokens if token.lower() != b"upgrade")
        if name != b"upgrade" and (kept or not value):
            lines.append(name + b": " + kept)
    return b"\r\n".join([*lines, b"", b""])
