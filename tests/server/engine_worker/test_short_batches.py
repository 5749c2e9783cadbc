"""Interactive requests next to low-priority ones on a slow encoder: batches stay short, and nobody starves."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import pytest

from embert.server.engine_worker.lanes import Request
from embert.server.engine_worker.scheduler import INTERACTIVE_MEMORY_S, SHORT_S
from tests.server.engine_worker.schedulers import next_batch, scheduler_of

FIXED_S, TOKEN_S, BATCH = 0.003, 0.00025, 2048  # MiniLM on two CPU cores: a full batch takes 0.5 s
QUERY, TEXT = 5, 62  # tokens


@dataclass
class Encoder:
    """Clients that send a short text `think_s` after each response, next to one low-priority request at a time."""

    clients: int
    think_s: float = 0.002
    low_priority_texts: int = 2048
    fixed_s: float = FIXED_S
    token_s: float = TOKEN_S
    batch: int = BATCH
    waited_s: list[float] = field(default_factory=list)
    low_priority_done_s: list[float] = field(default_factory=list)
    low_priority_tokens: int = 0

    def run(self, seconds: float) -> Encoder:
        scheduler = scheduler_of(self.batch, fixed_s=self.fixed_s, token_s=self.token_s)
        now, number, came = 0.0, 0, {}
        asks = [0.1 + client * 0.001 for client in range(self.clients)]  # a heap
        scheduler.add(Request("bulk", [TEXT] * self.low_priority_texts, low_priority=True))
        low_priority_since = now
        while now < seconds:
            while asks and asks[0] <= now:
                came[number] = heapq.heappop(asks)
                scheduler.add(Request(number, [QUERY]))
                number += 1
            batch = next_batch(scheduler)
            took_s = self.fixed_s + batch.tokens * self.token_s
            scheduler.settle(batch, took_s)
            now += took_s
            for piece in batch.slices:
                if piece.request.low_priority:
                    self.low_priority_tokens += piece.tokens
                    if piece.stop == piece.request.texts:
                        self.low_priority_done_s.append(now - low_priority_since)
                        low_priority_since = now
                        scheduler.add(Request("bulk", [TEXT] * self.low_priority_texts, low_priority=True))
                else:
                    self.waited_s.append(now - came.pop(piece.request.key))  # type: ignore[call-overload]
                    heapq.heappush(asks, now + self.think_s)
        return self

    @property
    def median_s(self) -> float:
        return sorted(self.waited_s)[len(self.waited_s) // 2]


@pytest.mark.parametrize("clients", [1, 8])
def test_a_query_waits_for_a_short_batch_and_not_for_a_full_one(clients: int) -> None:
    run = Encoder(clients).run(10.0)
    own_s = FIXED_S + clients * QUERY * TOKEN_S
    assert run.median_s <= SHORT_S + 2 * own_s
    # The first one may wait for a full low-priority batch, because it was not expected.
    assert sorted(run.waited_s)[-1 - clients] <= 2 * (SHORT_S + own_s)


@pytest.mark.parametrize("clients", [1, 8])
def test_a_large_low_priority_request_is_done_beside_a_few_queries(clients: int) -> None:
    """Alone it takes 32 s. Queries leave most of a batch empty, so low priority follows each of their batches."""
    run = Encoder(clients).run(60.0)
    assert run.low_priority_done_s
    assert run.low_priority_done_s[0] <= 55.0


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
    assert sum(seconds[:-1]) == pytest.approx(INTERACTIVE_MEMORY_S, abs=2 * SHORT_S)
