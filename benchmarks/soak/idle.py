"""Thousands of idle connections next to one client that works."""

from __future__ import annotations

import argparse
import contextlib
import resource
import socket
from collections import Counter

import numpy as np

from benchmarks.lib.load_generator import LoadGenerator
from benchmarks.lib.load_plan import Plan
from benchmarks.lib.running_server import embert
from benchmarks.soak.clients import Objective
from benchmarks.soak.overload import embed_requests


def idle(options: argparse.Namespace, seconds: float, serve_options: list[str]) -> list[Objective]:
    """Measure what idle connections cost: responses, latency, memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    requests = embed_requests(1)
    with LoadGenerator() as load, embert(*serve_options) as server, contextlib.ExitStack() as stack:
        plan = Plan(server.port, requests, 1, window_s=seconds)
        load.run(plan)
        alone = load.run(plan)
        rss_mb = server.rss_mb()["http"]
        # From several loopback addresses: one address has some 28 000 ephemeral ports.
        for number in range(options.connections):
            source = (f"127.0.0.{2 + number % 8}", 0)
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20, source))
        crowded = load.run(plan)
        held_mb = server.rss_mb()["http"] - rss_mb
    p50s = [float(np.median(responses.ended - responses.due)) * 1e3 for responses in (alone, crowded)]
    statuses = Counter(crowded.status.tolist())
    counts = ", ".join(f"{status}: {count}" for status, count in statuses.items())
    return [
        Objective("idle connections", f"{options.connections:,}"),
        Objective("responses next to them", counts, "200 only", kept=set(statuses) == {200}),
        Objective("p50 without and with them", f"{p50s[0]:.1f} and {p50s[1]:.1f} ms"),
        Objective("memory they take", f"{held_mb * 1e3 / options.connections:.0f} kB each"),
    ]
