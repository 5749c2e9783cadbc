"""Interactive requests next to low-priority ones on a slow encoder: batches stay short, and nobody starves."""

from __future__ import annotations

import pytest

from embert.server.engine_worker.lanes import Request
from embert.server.engine_worker.scheduler import INTERACTIVE_DEVICE_S, SHORT_S
from tests.server.engine_worker.schedulers import next_batch, scheduler_of

FIXED_S, TOKEN_S, BATCH = 0.003, 0.00025, 2048  # MiniLM on two CPU cores: a full batch takes 0.5 s
QUERY, TEXT = 5, 62  # tokens


def test_low_priority_fills_interactive_batches_where_that_takes_no_time() -> None:
    scheduler = scheduler_of(16384, fixed_s=0.0001, token_s=5e-8)  # MiniLM on an H100
    scheduler.add(Request("bulk", [TEXT] * 2048, low_priority=True))
    scheduler.add(Request("query", [QUERY]))
    batch = next_batch(scheduler)
    assert batch.slices[0].request.key == "query"
    assert batch.tokens > 16384 - TEXT


def test_a_busy_interactive_queue_is_not_held_up_by_what_follows_a_lone_query() -> None:
    """Low priority follows batches of which it could have had the larger part, and else goes first in one of eight."""
    scheduler = scheduler_of(BATCH, fixed_s=FIXED_S, token_s=TOKEN_S)
    scheduler.add(Request("bulk", [TEXT] * 2048, low_priority=True))
    low_priority = interactive = 0
    for number in range(64):
        for part in range(40):
            scheduler.add(Request((number, part), [TEXT]))
        batch = next_batch(scheduler)
        low_priority += sum(piece.tokens for piece in batch.slices if piece.request.low_priority)
        interactive += sum(piece.tokens for piece in batch.slices if not piece.request.low_priority)
    assert 0 < low_priority < 0.02 * interactive


def test_batches_of_low_priority_are_full_where_no_interactive_requests_come() -> None:
    scheduler = scheduler_of(BATCH, fixed_s=FIXED_S, token_s=TOKEN_S)
    scheduler.add(Request("bulk", [TEXT] * 20_000, low_priority=True))
    first = next_batch(scheduler)
    assert first.tokens > BATCH - TEXT
    scheduler.add(Request("query", [QUERY]))
    tokens: list[int] = []
    seconds: list[float] = []
    while not tokens or tokens[-1] < BATCH - TEXT:
        batch = next_batch(scheduler)
        tokens.append(batch.tokens)
        seconds.append(FIXED_S + batch.tokens * TOKEN_S)
    assert tokens[0] == QUERY
    assert max(seconds[:-1]) <= SHORT_S
    assert sum(seconds[:-1]) == pytest.approx(INTERACTIVE_DEVICE_S, abs=2 * SHORT_S)
