"""Fair share over random traffic: the number of slices of a request, and waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embert.engine import load_model
from embert.engine.models.flops import TokenCounts
from embert.server.engine_worker.batches import LEAD_SHARE
from embert.server.engine_worker.lanes import QUANTA, SMALL_PART, SMALL_SHARE, Request
from embert.server.engine_worker.scheduler import LOW_PRIORITY_INTERVAL, Scheduler
from embert.server.engine_worker.work_queue import WorkQueue
from tests.server.engine_worker.schedulers import next_batch, scheduler_of
from tests.server.engine_worker.virtual import BATCH_TOKENS, Speed, VirtualEngine

MINILM = Speed(device_s=0.0009, submit_s=0.00035, responses_s=0.0004, slice_s=20e-6)


def percentile(values: list[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(percent / 100 * len(values)))]


@pytest.mark.parametrize(("clients", "low_priority"), [(16, ()), (256, ()), (256, ("m",))])
def test_requests_of_32_passages_run_in_at_most_three_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clients: int, low_priority: tuple[str, ...]
) -> None:
    """The real loop before a simulated GPU: each piece is a slice of a batch, and a message to an HTTP process."""
    engine = VirtualEngine(tmp_path, monkeypatch, {"m": MINILM}, low_priority=low_priority)
    run = engine.run(floods={"m": clients}, short=("m", 200), seconds=0.3)
    assert len(run.pieces["m"]) > clients
    assert max(run.pieces["m"]) <= 3
    assert sum(run.pieces["m"]) <= 1.4 * len(run.pieces["m"])
    assert (
        percentile([float(each) for each in run.slices], 50) <= 8
    )  # as many requests as a batch holds, and short ones
    # A short text waits for the batch that runs and the one that was submitted ahead.
    assert max(run.waited_s["short"]) <= 4 * MINILM.device_s + 0.001


def test_throughput_does_not_fall_as_load_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = [
        VirtualEngine(tmp_path, monkeypatch, {"m": MINILM}).run(floods={"m": clients}, seconds=0.3).tokens_per_s["m"]
        for clients in (32, 64, 256)
    ]
    assert min(rates) >= 0.98 * max(rates)


def test_short_texts_do_not_lower_the_rate_that_bounds_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of one short text take their fixed time, a hundred times as long for each token."""
    engine = VirtualEngine(tmp_path, monkeypatch, {"m": MINILM}, slower=1.2)
    engine.run(floods={}, short=("m", 300), seconds=2.0)
    (rate,) = engine.rates()
    assert rate == pytest.approx(BATCH_TOKENS / MINILM.device_s, rel=0.25)


@dataclass
class Traffic:
    """Requests that come while batches run, and what became of them."""

    scheduler: Scheduler
    came: dict[Hashable, int] = field(default_factory=dict)  # the number of batches before it
    requests: dict[Hashable, Request] = field(default_factory=dict)
    pieces: defaultdict[Hashable, int] = field(default_factory=lambda: defaultdict(int))
    took: dict[Hashable, int] = field(default_factory=dict)  # batches until it was done
    batches: int = 0

    def come(self, lengths: list[int], *, low_priority: bool) -> None:
        key = len(self.came)
        self.came[key] = self.batches
        self.requests[key] = Request(key, lengths, low_priority=low_priority)
        self.scheduler.add(self.requests[key])

    def run(self) -> bool:
        batch = self.scheduler.next_batch()
        if batch is None:
            return False
        self.batches += 1
        for piece in batch.slices:
            self.pieces[piece.request.key] += 1
            if piece.stop == piece.request.texts:
                self.took[piece.request.key] = self.batches - self.came[piece.request.key]
        return True


BUDGET = 2048
QUANTUM = BUDGET // QUANTA
SMALL = QUANTUM // SMALL_SHARE
arrivals = st.lists(  # of the time of each batch
    st.lists(
        st.tuples(
            st.one_of(
                st.lists(st.integers(1, SMALL), min_size=1, max_size=1),
                st.lists(st.integers(1, QUANTUM // 2), min_size=1, max_size=40),
            ),
            st.booleans(),
        ),
        max_size=12,
    ),
    min_size=1,
    max_size=20,
)


@settings(deadline=None, max_examples=100)
@given(arrivals)
def test_bounds_hold_for_any_traffic(arrivals: list[list[tuple[list[int], bool]]]) -> None:
    traffic = Traffic(scheduler_of(BUDGET))
    for requests in arrivals:
        for lengths, low_priority in requests:
            traffic.come(lengths, low_priority=low_priority)
        traffic.run()
    while traffic.run():
        pass
    assert set(traffic.took) == set(traffic.came)  # none starves
    for key, request in traffic.requests.items():
        rounds = ceil(request.offsets[-1] / QUANTUM)
        # Each round is interrupted once at most, and a low-priority request's by each interactive batch that it fills.
        assert traffic.pieces[key] <= (4 if request.low_priority else 2) * rounds
    # A small interactive request waits for those before it, of which half of a batch runs at once, and no longer.
    small = [
        request for request in traffic.requests.values() if request.offsets[-1] <= SMALL and not request.low_priority
    ]
    for request in small:
        before = sum(
            each.offsets[-1]
            for each in small
            if traffic.came[each.key] <= traffic.came[request.key]
            and traffic.came[each.key] + traffic.took[each.key] > traffic.came[request.key]
        )
        batches = ceil(before / (BUDGET // SMALL_PART - QUANTUM - SMALL))
        assert traffic.took[request.key] <= batches + batches // (LOW_PRIORITY_INTERVAL - 1) + 1


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 40), st.integers(0, 100), st.integers(0, 1000))
def test_large_requests_have_equal_shares_whatever_small_ones_do(large: int, small: int, seed: int) -> None:
    rng = Random(seed)
    scheduler = scheduler_of(BUDGET)
    for number in range(large):
        scheduler.add(Request(("large", number), [rng.randint(16, 250) for _ in range(100)]))
    tokens = dict.fromkeys(range(large), 0)
    for number in range(2 * large):
        for each in range(small):
            scheduler.add(Request((number, each), [16]))
        batch = next_batch(scheduler)
        for piece in batch.slices:
            key = piece.request.key
            assert isinstance(key, tuple)
            if key[0] == "large":
                tokens[key[1]] += piece.tokens
        assert max(tokens.values()) - min(tokens.values()) <= QUANTUM + 2 * 250
    # Half of each batch is theirs.
    assert sum(tokens.values()) >= 2 * large * (BUDGET // 2 - 250)


def test_a_short_text_waits_for_the_long_one_that_is_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a stream of the longest texts. In a batch's last part, LEAD_SHARE, the next one is submitted already."""
    engine = VirtualEngine(tmp_path, monkeypatch, {"m": MINILM}, long_text=32_768)
    (counted,) = TokenCounts(load_model().config).of([32_768])
    long_s = MINILM.of(counted)
    run = engine.run(floods={"m": 8}, short=("m", 50), seconds=4.0)
    assert len(run.waited_s["short"]) > 100
    assert max(run.waited_s["short"]) <= (1 + LEAD_SHARE) * long_s + 0.003
    assert len(run.waited_s["m"]) >= 0.9 * 4.0 / long_s


@pytest.mark.parametrize(("clients", "slower"), [(16, 1.0), (64, 0.8), (64, 1.25)])
def test_a_short_text_waits_for_no_batch_that_is_bound_early(
    clients: int, slower: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[float, float]:
        speed = Speed(device_s=0.0052, submit_s=0.0003, responses_s=0.0008)
        engine = VirtualEngine(tmp_path, monkeypatch, {"base": speed}, slower=slower)
        found = engine.run(floods={"base": clients}, short=("base", 100.0), seconds=1.0)
        return found.tokens_per_s["base"], percentile(found.waited_s["short"], 50)

    rate, waited_s = run()
    monkeypatch.setattr(WorkQueue, "expects_short", lambda _: False)
    early_rate, early_waited_s = run()
    assert waited_s < 0.9 * early_waited_s
    assert rate > 0.99 * early_rate
