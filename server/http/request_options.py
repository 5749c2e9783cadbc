"""What a request asks for in its headers: by when it must be answered, and whether others may go before it.

`X-Request-Timeout: 1.5` is in seconds and counts from the end of the request's head; more than --request-timeout is cut
to that. `X-Priority: bulk` lets interactive requests go first. Without the header, the model's configuration decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from embert.server.http.errors import Invalid, describe_name
from embert.server.observability.request_record import INTERACTIVE, LOW_PRIORITY

__all__ = ["TIMEOUT_HEADER", "RequestOptions", "read_request_options"]

TIMEOUT_HEADER = "X-Request-Timeout"
_SECONDS = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclass(slots=True)
class RequestOptions:
    """The headers' values, checked."""

    timeout_s: float
    set_by: str  # the option or the header that the timeout is from
    deadline: float  # on CLOCK_MONOTONIC
    low_priority: bool = False
    has_priority: bool = False  # whether a header says `bulk` or not

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
    return Invalid(f"`{name}` must be {wanted}; it is {describe_name(value.decode('latin-1'))}", name)
