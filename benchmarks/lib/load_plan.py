"""The requests of a load, the plan of a run, and its responses."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LOST = 0  # the status of a request whose connection broke
NO_RESPONSE = 1  # the status of a request that had no response when the run gave up waiting


@dataclass(frozen=True, slots=True)
class Request:
    """One request as bytes, and the work it asks for."""

    payload: bytes
    kind: str
    texts: int
    tokens: int


def post(path: str, body: object, *, kind: str, texts: int, tokens: int, accept: str = "*/*") -> Request:
    """Build a POST of `body` as JSON."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return Request(head.encode() + content, kind, texts, tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """One run against one server. The measured window opens `settle_s` after the first request."""

    port: int
    requests: tuple[Request, ...]  # sent in this order, over and over
    connections: int
    window_s: float
    settle_s: float = 1.0
    rate: float | None = None  # requests/s of an open loop; None is a closed loop
    even: bool = False  # open loop: requests are due at even intervals, not at Poisson arrivals
    phase: float = 0.0  # share of such an interval before the first request
    host: str = "127.0.0.1"
    seed: int = 0
    status: int = 200  # of a response that counts


@dataclass(frozen=True, slots=True)
class Responses:
    """One entry a request, in the order of the responses. Times are seconds on CLOCK_MONOTONIC."""

    request: npt.NDArray[np.int32]  # index into the plan's requests
    status: npt.NDArray[np.int32]  # HTTP status, LOST or NO_RESPONSE
    due: npt.NDArray[np.float64]
    ended: npt.NDArray[np.float64]
    late_s: npt.NDArray[np.float64]  # open loop: how late the load itself sent each request
    opened: float  # start of the measured window
    client_cores: float  # CPU seconds a second of the load, all its processes together
    busiest_client: float  # CPU seconds a second of its busiest process; near 1 the load was the limit
