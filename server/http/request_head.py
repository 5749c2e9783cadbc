"""The line and the headers of a request: checks, and the options in them.

Clients send the same head again and again over a connection. `KnownHeads` keeps what was parsed and checked of one, so
that the next request with the same bytes costs a look-up in a dictionary instead of a callback for each header.

`X-Request-Timeout: 1.5` is in seconds and counts from the end of the request's head; more than --request-timeout is cut
to that. `X-Priority: bulk` lets interactive requests go first. Without the header, the model's configuration decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import httptools

from embert.server.http.errors import BadRequest, Invalid, RequestError, describe_name
from embert.server.observability.request_record import INTERACTIVE, LOW_PRIORITY
from embert.server.observability.scraping import Form

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
    """The path, still percent-encoded, and the query. Raises BadRequest if there is no path."""
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


TIMEOUT_HEADER = "X-Request-Timeout"
_SECONDS = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclass(slots=True)
class RequestOptions:
    """Checked values of the headers."""

    timeout_s: float
    set_by: str  # the option or the header that the timeout is from
    deadline: float  # on CLOCK_MONOTONIC
    low_priority: bool = False
    has_priority: bool = False  # a header sets the priority

    @property
    def priority(self) -> str:
        """The label of metrics."""
        return LOW_PRIORITY if self.low_priority else INTERACTIVE


def read_request_options(headers: Iterable[tuple[bytes, bytes]], arrived: float, limit_s: float) -> RequestOptions:
    """The options of a request that arrived then (CLOCK_MONOTONIC). Raises Invalid for a value that it cannot read."""
    options = RequestOptions(limit_s, "--request-timeout", arrived + limit_s)
    for name, value in headers:
        if name == b"x-request-timeout":
            timeout_s = float(value) if _SECONDS.fullmatch(value) else 0.0
            if not timeout_s:
                raise _invalid(TIMEOUT_HEADER, "a number of seconds above 0", value)
            if timeout_s < limit_s:
                options.timeout_s, options.set_by = timeout_s, TIMEOUT_HEADER
                options.deadline = arrived + timeout_s
        elif name == b"x-priority":
            if value not in (b"interactive", b"bulk"):
                raise _invalid("X-Priority", "`interactive` or `bulk`", value)
            options.low_priority, options.has_priority = value == b"bulk", True
    return options


def _invalid(name: str, wanted: str, value: bytes) -> Invalid:
    return Invalid(f"must be {wanted}", name, value=describe_name(value.decode("latin-1")))


# --- content negotiation by `Accept` and `Accept-Encoding` (RFC 9110, section 12.5) ---

_WEIGHT = re.compile(rb"0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?")
MAX_BYTES = 2048  # of a client's headers of one name; parsing them takes 0.4 µs a byte on the event loop


def prefers(media_type: bytes, default: bytes, values: list[bytes], header: str = "Accept") -> bool:
    """True if a client with these values of the header prefers `media_type` to `default`.

    Where both weigh the same, `media_type` is wanted if it is named and `default` is not, but allowed by a wildcard. A
    client that takes neither gets the default. Raises RequestError for headers of more than MAX_BYTES.
    """
    if values in ([], [b"*/*"]):
        return False
    weights = _weights(values, header)
    wanted = _weight(media_type, weights)
    return wanted[0] > 0 and wanted > _weight(default, weights)


def scrape_form(headers: Iterable[tuple[bytes, bytes]]) -> Form:
    """The format of metrics that a client asks for. Raises RequestError as `prefers` does."""
    accept = [value for name, value in headers if name == b"accept"]
    encodings = [value for name, value in headers if name == b"accept-encoding"]
    return Form(
        openmetrics=prefers(b"application/openmetrics-text", b"text/plain", accept),
        gzip=prefers(b"gzip", b"identity", encodings, "Accept-Encoding"),
    )


def _weights(values: list[bytes], header: str) -> dict[bytes, float]:
    """The weight of each range; a malformed one counts as 0. Raises RequestError for more than MAX_BYTES."""
    if (size := sum(map(len, values)) + len(values)) > MAX_BYTES:
        raise RequestError(f"`{header}` has {size} bytes", limit=MAX_BYTES, status=431)
    weights: dict[bytes, float] = {}
    for element in b",".join(values).lower().split(b","):
        name, *parameters = [part.strip() for part in element.split(b";")]
        quality = next((part[2:].strip() for part in parameters if part.startswith(b"q=")), b"1")
        weight = float(quality) if _WEIGHT.fullmatch(quality) else 0.0
        weights[name] = max(weight, weights.get(name, 0.0))
    return weights


def _weight(media_type: bytes, weights: dict[bytes, float]) -> tuple[float, int]:
    """The weight that the most specific matching range gives, and how specific that range is."""
    names = (b"*/*", media_type.partition(b"/")[0] + b"/*", media_type)
    specificity = max((index for index, name in enumerate(names) if name in weights), default=-1)
    return (weights[names[specificity]], specificity) if specificity >= 0 else (0.0, -1)
