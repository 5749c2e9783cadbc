"""Where the time of a request goes, by the server's own account: its Server-Timing header."""

from __future__ import annotations

import http.client
import re
import statistics
import time
from collections.abc import Sequence

from benchmarks.lib.load_worker import Request

__all__ = ["parts_ms"]


def parts_ms(port: int, requests: Sequence[Request], count: int = 200) -> dict[str, float]:
    """Send one request after the other over one connection: medians in ms; `client` is the whole, as seen from here."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    found: dict[str, list[float]] = {}
    for number in range(len(requests) + count):  # each once before it counts
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
            found.setdefault(name, []).append(float(ms))
    connection.close()
    return {name: statistics.median(values) for name, values in found.items()}
