"""benchmarks.soak: ten times the load that can be done, and thousands of connections that do nothing."""

from __future__ import annotations

import argparse
import contextlib
import resource
import socket
import statistics
from collections import Counter

import httpx
import numpy as np

from benchmarks.lib.load_generator import Load
from benchmarks.lib.load_worker import Answers, Plan, Request, post
from benchmarks.lib.running_server import embert
from benchmarks.lib.texts import PASSAGE_TOKENS, QUERY_TOKENS, texts
from benchmarks.soak.slo import Line
from embert.engine import load_model

__all__ = ["idle", "overload"]

OVERLOAD = 10  # times what the server can do


def overload(options: argparse.Namespace, seconds: float, serve_options: list[str]) -> list[Line]:
    """What is answered, how late and how much, when ten times the capacity is asked for."""
    size = options.texts
    requests = _requests(size)
    tokens = statistics.mean(request.tokens for request in requests)
    with Load(options.clients) as load, embert("--max-queue-tokens", "16384", *serve_options) as serving:
        budget = httpx.get(f"http://127.0.0.1:{serving.port}/info").json()["max_queue_tokens"]
        # As many in flight as the budget admits: more are refused, fewer leave the queue shorter than it may be.
        fit = max(1, int(budget / tokens) - 1)
        load.run(Plan(serving.port, requests, fit, window_s=2.0, settle_s=0.0))
        window_s = max(10.0, seconds / 4)
        at_capacity = Plan(serving.port, requests, fit, window_s=window_s, settle_s=5.0)
        # Before the flood and after it: a shared machine becomes slower or faster meanwhile.
        before = load.run(at_capacity)
        flood_rate = OVERLOAD * _goodput(before, window_s)
        flood = load.run(
            Plan(serving.port, requests, max(512, 3 * fit), window_s=seconds, settle_s=5.0, rate=flood_rate)
        )
        around = (before, load.run(at_capacity))
    rates = [_goodput(answers, window_s) for answers in around]
    rate, p99_ms = statistics.mean(rates), statistics.mean(map(_p99_ms, around))
    counts = Counter(flood.status.tolist())
    goodput, flood_p99_ms = _goodput(flood, seconds), _p99_ms(flood)
    late_ms = float(np.percentile(flood.late_s, 99)) * 1e3
    return [
        Line(
            f"capacity before and after, requests of {size} texts",
            f"{rates[0]:.2f}/s and {rates[1]:.2f}/s, {rate * tokens:,.0f} tokens/s",
        ),
        Line(
            f"answers to {OVERLOAD} times as much",
            ", ".join(f"{status}: {count}" for status, count in sorted(counts.items())),
            "200 and 429 only",
            kept=set(counts) <= {200, 429},
        ),
        Line(
            "p99 of the admitted",
            f"{flood_p99_ms:,.0f} ms ({flood_p99_ms / p99_ms:.2f} times the {p99_ms:,.0f} ms at capacity)",
            "2 times",
            kept=flood_p99_ms <= 2 * p99_ms,
        ),
        Line("goodput", f"{goodput:.2f}/s ({goodput / rate:.0%} of capacity)", "90%", kept=goodput >= 0.9 * rate),
        Line("lateness of the load itself, p99", f"{late_ms:.1f} ms"),
    ]


def _goodput(answers: Answers, window_s: float) -> float:
    moment = answers.answered
    inside = (moment >= answers.opened) & (moment < answers.opened + window_s)
    return float((inside & (answers.status == 200)).sum()) / window_s


def _p99_ms(answers: Answers) -> float:
    # By when it was sent: what is due while the window is open may wait for the load's own connections.
    good = (answers.status == 200) & (answers.due >= answers.opened)
    return float(np.percentile((answers.answered - answers.due)[good], 99)) * 1e3


def _requests(size: int) -> tuple[Request, ...]:
    """Queries where they come one by one, else passages."""
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


def _info(port: int) -> dict[str, int]:
    import httpx

    info: dict[str, int] = httpx.get(f"http://127.0.0.1:{port}/info").json()
    return info


def idle(options: argparse.Namespace, seconds: float, serve_options: list[str]) -> list[Line]:
    """Whether idle connections are in anybody's way."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    requests = _requests(1)
    with Load() as load, embert(*serve_options) as serving, contextlib.ExitStack() as stack:
        plan = Plan(serving.port, requests, 1, window_s=seconds)
        load.run(plan)
        alone = load.run(plan)
        rss_mb = serving.rss_mb()["api"]
        # From several addresses of this machine: one has no more than 28 000 ports.
        for number in range(options.connections):
            source = (f"127.0.0.{2 + number % 8}", 0)
            stack.enter_context(socket.create_connection(("127.0.0.1", serving.port), 20, source))
        crowded = load.run(plan)
        held_mb = serving.rss_mb()["api"] - rss_mb
    p50s = [float(np.median(answers.answered - answers.due)) * 1e3 for answers in (alone, crowded)]
    statuses = Counter(crowded.status.tolist())
    return [
        Line("idle connections", f"{options.connections:,}"),
        Line("answers beside them", ", ".join(map(str, statuses.items())), "200 only", kept=set(statuses) == {200}),
        Line("p50 without and with them", f"{p50s[0]:.1f} and {p50s[1]:.1f} ms"),
        Line("memory they take", f"{held_mb * 1e3 / options.connections:.0f} kB each"),
    ]
