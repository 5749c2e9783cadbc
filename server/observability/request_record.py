"""The record of one request, for metrics and the access log.

The layers that a request passes fill it in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from embert.server.observability.tracing.request_trace import RequestTrace

INTERACTIVE, LOW_PRIORITY = "interactive", "bulk"
PRIORITIES = (INTERACTIVE, LOW_PRIORITY)
SCOPE_KEY = "embert"  # of the record of an operation in its ASGI scope
# The outcome of a request. `expired`: its own deadline, shorter than the server's, passed.
ANSWERED, REFUSED, FAILED, EXPIRED, CLIENT_ERROR, DISCONNECTED = OUTCOMES = (
    "answered", "refused", "failed", "expired", "client_error", "disconnected",
)  # fmt: skip
CLIENT_LEFT = 499  # nginx's number, for metrics and the access log only


def outcome_of(status: int) -> str:
    """Returns one of OUTCOMES for a response whose error does not have one."""
    if status < 400:
        return ANSWERED
    if status == 429:
        return REFUSED
    if status == CLIENT_LEFT:
        return DISCONNECTED
    return FAILED if status >= 500 or status == 424 else CLIENT_ERROR


class Parts(Protocol):
    """Seconds of each part of a request; 0.0 for a part that it did not reach."""

    tokenize_s: float
    queue_s: float
    inference_s: float
    encode_s: float
    engine: int  # index of the last engine that ran it; -1: none
    tokens: int


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request."""

    route: str
    id: bytes  # printable ASCII: the client's X-Request-Id, or generated
    trace_id: bytes = b""  # 32 hexadecimal digits, or empty
    priority: str = ""  # one of PRIORITIES; empty on routes that use no model
    model: str = ""  # its served name; empty where the request was refused before it was known
    status: int = 0
    outcome: str = ""  # one of OUTCOMES if an error has one; empty: `outcome_of` its status
    key: str = ""  # name of the API key
    parts: Parts | None = None
    held: int = 0  # bytes of HeldBytes.requests, until it has ended
    started: float = 0.0  # of perf_counter
    trace: RequestTrace | None = None  # None: it is not sampled
