"""Ten times the load that the server can do: its responses, how late, and how many."""

from __future__ import annotations

import argparse
import statistics
from collections import Counter

import httpx
import numpy as np

from benchmarks.lib.load_generator import LoadGenerator
from benchmarks.lib.load_plan import Plan, Request, Responses, post
from benchmarks.lib.running_server import embert
from benchmarks.lib.texts import PASSAGE_TOKENS, QUERY_TOKENS, texts
from benchmarks.soak.clients import Objective
from embert.engine import load_model

OVERLOAD = 10  # times the server's capacity


def overload(options: argparse.Namespace, seconds: float, serve_options: list[str]) -> list[Objective]:
    """Measure statuses, the p99 of admitted requests and the goodput, next to those at capacity."""
    size = options.texts
    requests = embed_requests(size)
    tokens = statistics.mean(request.tokens for request in requests)
    with LoadGenerator(options.clients) as load, embert("--max-queue-tokens", "16384", *serve_options) as server:
        budget = httpx.get(f"http://127.0.0.1:{server.port}/info").json()["max_queue_tokens"]
        # As many in flight as the queue admits: with more, some are refused; with fewer, the queue is not full.
        fit = max(1, int(budget / tokens) - 1)
        load.run(Plan(server.port, requests, fit, window_s=2.0, settle_s=0.0))
        window_s = max(10.0, seconds / 4)
        at_capacity = Plan(server.port, requests, fit, window_s=window_s, settle_s=5.0)
        # Capacity before and after the overload, because the speed of a shared machine drifts.
        before = load.run(at_capacity)
        rate = OVERLOAD * _goodput(before, window_s)
        flood = load.run(Plan(server.port, requests, max(512, 3 * fit), window_s=seconds, settle_s=5.0, rate=rate))
        around = (before, load.run(at_capacity))
    capacities = [_goodput(responses, window_s) for responses in around]
    capacity, capacity_p99_ms = statistics.mean(capacities), statistics.mean(map(_p99_ms, around))
    counts = Counter(flood.status.tolist())
    goodput, flood_p99_ms = _goodput(flood, seconds), _p99_ms(flood)
    times = flood_p99_ms / capacity_p99_ms
    late_ms = float(np.percentile(flood.late_s, 99)) * 1e3
    return [
        Objective(
            f"capacity before and after, requests of {size} texts",
            f"{capacities[0]:.2f}/s and {capacities[1]:.2f}/s, {capacity * tokens:,.0f} tokens/s",
        ),
        Objective(
            f"responses to {OVERLOAD} times as much",
            ", ".join(f"{status}: {count}" for status, count in sorted(counts.items())),
            "200 and 429 only",
            kept=set(counts) <= {200, 429},
        ),
        Objective(
            "p99 of the admitted",
            f"{flood_p99_ms:,.0f} ms ({times:.2f} times the {capacity_p99_ms:,.0f} ms at capacity)",
            "2 times",
            kept=flood_p99_ms <= 2 * capacity_p99_ms,
        ),
        Objective(
            "goodput",
            f"{goodput:.2f}/s ({goodput / capacity:.0%} of capacity)",
            "90%",
            kept=goodput >= 0.9 * capacity,
        ),
        Objective("lateness of the load itself, p99", f"{late_ms:.1f} ms"),
    ]


def embed_requests(size: int) -> tuple[Request, ...]:
    """Return 64 requests of `size` texts: queries where that is 1, else passages."""
    lengths = PASSAGE_TOKENS if size > 1 else QUERY_TOKENS
    drawn = texts(lengths, 64 * size, load_model().transformer_folder / "tokenizer.json", seed=1)
    groups = [drawn[i : i + size] for i in range(0, len(drawn), size)]
    return tuple(
        post(
            "/embed",
            {"inputs": [text.text for text in group]},
            kind="all",
            texts=size,
            tokens=sum(text.tokens for text in group),
            accept="application/octet-stream",
        )
        for group in groups
    )


def _goodput(responses: Responses, window_s: float) -> float:
    """Return the 200s a second of the measured window."""
    moment = responses.ended
    inside = (moment >= responses.opened) & (moment < responses.opened + window_s)
    return float((inside & (responses.status == 200)).sum()) / window_s


def _p99_ms(responses: Responses) -> float:
    """Return the p99 of the 200s that were due since the window opened, from the moment due."""
    good = (responses.status == 200) & (responses.due >= responses.opened)
    return float(np.percentile((responses.ended - responses.due)[good], 99)) * 1e3
