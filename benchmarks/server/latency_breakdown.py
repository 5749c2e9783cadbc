"""Where the time of a request goes, as the server itself reports it in the Server-Timing header."""

from __future__ import annotations

import http.client
import re
import statistics
import time
from collections.abc import Sequence

from benchmarks.lib.load_plan import Request

__all__ = ["latency_breakdown_ms"]


def latency_breakdown_ms(port: int, requests: Sequence[Request], count: int = 200) -> dict[str, float]:
    """Send requests one by one over one connection; return medians in ms by stage, and `client`, the whole round trip.

    Each of `requests` is sent once as a warm-up, then `count` of them are measured.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port)
    stages: dict[str, list[float]] = {}
    for number in range(len(requests) + count):
        payload = requests[number % len(requests)].payload
        head, body = payload.split(b"\r\n\r\n", 1)
        began = time.perf_counter()
        connection.request("POST", head.split(b" ", 2)[1].decode(), body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        took_ms = (time.perf_counter() - began) * 1e3
        if number < len(requests):
            continue
        for name, ms in (*re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"]), ("client", took_ms)):
            stages.setdefault(name, []).append(float(ms))
    connection.close()
    return {name: statistics.median(values) for name, values in stages.items()}
