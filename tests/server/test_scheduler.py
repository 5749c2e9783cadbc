"""The scheduler: no text lost, doubled or reordered; budgets kept; batches bound late; shares fair."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.scheduler import BULK_TURN, Batch, Request, Scheduler

BUDGET, TEXT_BUDGET, LONGEST = 100, 12, 40

lengths_of_a_request = st.lists(st.integers(1, LONGEST), min_size=1, max_size=40)


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, batches, cancellations and deadlines, against a model of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(BUDGET, TEXT_BUDGET)
        self.clock = 0.0
        self.count = 0
        self.waiting: dict[int, list[tuple[int, int]]] = {}  # key → (text, tokens) not yet in a batch
        self.tasks: dict[int, str] = {}
        self.deadlines: dict[int, float] = {}
        self.bulk: set[int] = set()

    @rule(
        lengths=lengths_of_a_request,
        task=st.sampled_from(["embed", "embed", "tokens"]),
        patience=st.integers(1, 8),
        bulk=st.sampled_from([False, False, True]),
    )
    def add(self, lengths: list[int], task: str, patience: int, bulk: bool) -> None:
        key = self.count
        self.count += 1
        self.waiting[key], self.tasks[key] = list(enumerate(lengths)), task
        self.deadlines[key] = self.clock + patience
        self.bulk |= {key} if bulk else set()
        self.scheduler.add(Request(key, lengths, task, self.deadlines[key], bulk))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.scheduler.cancel(key) == len(self.waiting.pop(key))
        assert self.scheduler.cancel(key) == 0

    @rule()
    def let_time_pass(self) -> None:
        self.clock += 1.0
        late = {request.key for request in self.scheduler.expire(self.clock)}
        assert late == {key for key in self.waiting if self.deadlines[key] < self.clock}
        for key in list(self.waiting):
            if self.deadlines[key] < self.clock:
                del self.waiting[key]

    @rule()
    def run_a_batch(self) -> None:
        full, oldest = self.scheduler.full(), next(iter(self.scheduler.waiting()), None)
        assert oldest is None or isinstance(oldest, int)
        candidates = {key for key in self.waiting if oldest is not None and self.tasks[key] == self.tasks[oldest]}
        small = {
            key
            for key in candidates - self.bulk
            if sum(tokens for _, tokens in self.waiting[key]) <= (BUDGET - 2 * LONGEST) // len(candidates)
            and len(self.waiting[key]) <= (TEXT_BUDGET - 2) // len(candidates)
        }
        first = next((key for key in self.scheduler.waiting() if key in (candidates - self.bulk or candidates)), None)
        batch = self.scheduler.next_batch()
        if batch is None:
            assert not self.waiting
            return
        self._check_contents(batch)
        self._check_nothing_more_fits(batch, candidates)
        assert small.isdisjoint(self.waiting), "a small request was left out because of large ones"
        assert first in {piece.request.key for piece in batch.slices}, "the one waiting longest got nothing"
        if full:
            left = [self.waiting[key][0][1] for key in candidates & set(self.waiting)]
            assert not left or batch.texts == TEXT_BUDGET or batch.tokens + min(left) > BUDGET

    def _check_contents(self, batch: Batch) -> None:
        assert 1 <= batch.texts <= TEXT_BUDGET
        assert 1 <= batch.tokens <= BUDGET
        assert len({piece.request.key for piece in batch.slices}) == len(batch.slices)
        tokens = 0
        for piece in batch.slices:
            key = piece.request.key
            assert isinstance(key, int)
            assert self.tasks[key] == batch.task
            mine = self.waiting[key]
            taken, rest = mine[: piece.stop - piece.start], mine[piece.stop - piece.start :]
            assert [text for text, _ in taken] == list(
                range(piece.start, piece.stop)
            )  # in order, none missing, none twice
            assert sum(length for _, length in taken) == piece.tokens
            tokens += piece.tokens
            if rest:
                self.waiting[key] = rest
            else:
                del self.waiting[key]
        assert tokens == batch.tokens

    def _check_nothing_more_fits(self, batch: Batch, candidates: set[int]) -> None:
        """Bound late: everything that was there and fitted is in it."""
        if batch.texts < TEXT_BUDGET:
            for key in candidates & set(self.waiting):
                assert batch.tokens + self.waiting[key][0][1] > BUDGET

    @invariant()
    def counters_are_right(self) -> None:
        assert self.scheduler.queue_texts == sum(map(len, self.waiting.values()))
        assert self.scheduler.queue_tokens == sum(tokens for texts in self.waiting.values() for _, tokens in texts)
        assert set(self.scheduler.waiting()) == set(self.waiting)

    @invariant()
    def what_is_ahead_is_reckoned_rightly(self) -> None:
        sizes = {key: sum(tokens for _, tokens in texts) for key, texts in self.waiting.items()}
        interactive = {key: tokens for key, tokens in sizes.items() if key not in self.bulk}
        bulk = {key: tokens for key, tokens in sizes.items() if key in self.bulk}
        for mine in (1, 7, 50, 10_000):
            exactly = sum(min(tokens, mine) for tokens in interactive.values())
            assert exactly <= self.scheduler.ahead(mine, bulk=False) <= 2 * exactly
            exactly = sum(interactive.values()) + sum(min(tokens, mine) for tokens in bulk.values())
            assert exactly <= self.scheduler.ahead(mine, bulk=True) <= 2 * exactly


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase


@given(st.lists(lengths_of_a_request, min_size=1, max_size=20))
def test_every_text_leaves_once_and_in_order(requests: list[list[int]]) -> None:
    scheduler = Scheduler(BUDGET)
    for key, lengths in enumerate(requests):
        scheduler.add(Request(key, lengths))
    seen: dict[object, list[int]] = {key: [] for key in range(len(requests))}
    while (batch := scheduler.next_batch()) is not None:
        for piece in batch.slices:
            seen[piece.request.key] += range(piece.start, piece.stop)
    assert seen == {key: list(range(len(lengths))) for key, lengths in enumerate(requests)}
    assert scheduler.queue_texts == scheduler.queue_tokens == 0


def test_a_small_request_waits_for_one_batch_at_most_behind_large_ones() -> None:
    scheduler = Scheduler(1000)
    for key in range(5):
        scheduler.add(Request(f"large-{key}", [50] * 400))
    assert scheduler.next_batch() is not None  # this one runs when the small request arrives
    scheduler.add(Request("small", [30, 30]))
    batch = scheduler.next_batch()
    assert batch is not None
    shares = {piece.request.key: piece.tokens for piece in batch.slices}
    assert shares["small"] == 60
    large = [tokens for key, tokens in shares.items() if key != "small"]
    assert len(large) == 5
    assert max(large) - min(large) <= 50  # equal, up to one text


def test_many_small_requests_do_not_starve_a_large_one() -> None:
    scheduler = Scheduler(100)
    scheduler.add(Request("large", [60] * 10))
    batches = 0
    while "large" in scheduler.waiting():
        for key in range(9):  # these alone are nine tenths of what can be run
            scheduler.add(Request((batches, key), [10]))
        assert scheduler.next_batch() is not None
        batches += 1
        assert batches <= 10 * 10


def test_bulk_runs_in_what_others_leave() -> None:
    scheduler = Scheduler(100)
    scheduler.add(Request("bulk", [30] * 20, bulk=True))
    for number in range(6):
        scheduler.add(Request(number, [20, 20]))
    batches = [scheduler.next_batch() for _ in range(4)]
    shares = [{p.request.key: p.tokens for p in batch.slices} for batch in batches if batch is not None]
    assert [sum(tokens for key, tokens in share.items() if key != "bulk") for share in shares] == [100, 100, 40, 0]
    assert [share.get("bulk", 0) for share in shares] == [0, 0, 60, 90]


def test_bulk_is_not_starved_by_others_without_end() -> None:
    scheduler = Scheduler(100)
    scheduler.add(Request("bulk", [60] * 5, bulk=True))
    batches = 0
    while "bulk" in scheduler.waiting():
        for key in range(10):  # all that can be run, again and again
            scheduler.add(Request((batches, key), [10]))
        assert scheduler.next_batch() is not None
        batches += 1
        assert batches <= 5 * BULK_TURN
    assert batches >= 4 * BULK_TURN


def test_a_batch_closes_when_it_is_taken_and_not_before() -> None:
    scheduler = Scheduler(100)
    scheduler.add(Request("first", [10]))
    assert not scheduler.full()  # so nobody may take it ahead
    scheduler.add(Request("second", [10]))
    batch = scheduler.next_batch()
    assert batch is not None
    assert [piece.request.key for piece in batch.slices] == ["first", "second"]
    scheduler.add(Request("third", [60, 60]))
    assert scheduler.full()


def test_a_full_batch_is_one_of_the_task_that_comes_next() -> None:
    scheduler = Scheduler(100)
    scheduler.add(Request("few", [10], task="tokens"))
    scheduler.add(Request("many", [50] * 10, task="embed"))
    assert not scheduler.full()
    batch = scheduler.next_batch()
    assert batch is not None
    assert batch.task == "tokens"
    assert scheduler.full()


@pytest.mark.parametrize(("lengths", "why"), [([0], "0 tokens"), ([5, 101], "101 tokens"), ([-3], "-3 tokens")])
def test_impossible_texts_are_refused(lengths: list[int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Scheduler(100).add(Request("x", lengths))


def test_a_key_is_queued_once() -> None:
    scheduler = Scheduler(100)
    scheduler.add(Request("x", [1]))
    with pytest.raises(ValueError, match="'x' is queued already"):
        scheduler.add(Request("x", [1]))


def test_a_request_without_texts_is_nothing() -> None:
    scheduler = Scheduler(100)
    scheduler.add(Request("x", []))
    assert scheduler.next_batch() is None
    assert scheduler.cancel("x") == 0
