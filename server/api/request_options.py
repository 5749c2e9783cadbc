"""The terms a request sets in its headers: by when it must be answered, and whether others may go before it.

`X-Request-Timeout: 1.5` is in seconds and counts from the end of the request's head; more than --request-timeout is cut
to that. `X-Priority: bulk` lets interactive requests (the default) go before this one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from embert.server.api.schemas import describe_name
from embert.server.http.errors import Invalid

__all__ = ["Terms", "read_terms"]

_SECONDS = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclass(slots=True)
class Terms:
    """Checked."""

    timeout_s: float
    set_by: str  # the option or the header that the time is from
    deadline: float  # on CLOCK_MONOTONIC
    bulk: bool = False


def read_terms(headers: list[tuple[bytes, bytes]], arrived: float, limit_s: float) -> Terms:
    """The terms of a request that arrived then (CLOCK_MONOTONIC). Raises Invalid for a header it cannot understand."""
    terms = Terms(limit_s, "--request-timeout", arrived + limit_s)
    for name, value in headers:
        if name == b"x-request-timeout":
            timeout_s = float(value) if _SECONDS.fullmatch(value) else 0.0
            if not timeout_s:
                raise _invalid("X-Request-Timeout", "a number of seconds above 0", value)
            if timeout_s < limit_s:
                terms.timeout_s, terms.set_by = timeout_s, "X-Request-Timeout"
                terms.deadline = arrived + timeout_s
        elif name == b"x-priority":
            if value not in (b"interactive", b"bulk"):
                raise _invalid("X-Priority", "`interactive` or `bulk`", value)
            terms.bulk = value == b"bulk"
    return terms


def _invalid(name: str, wanted: str, value: bytes) -> Invalid:
    return Invalid(f"`{name}` must be {wanted}; it is {describe_name(value.decode('latin-1'))}", name)
