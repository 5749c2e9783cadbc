"""The scheduler: no text lost, doubled or reordered; budgets kept; batches bound late; shares fair."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from embert.engine import load_model
from embert.engine.models.flops import TokenCounts
from embert.server.engine_worker.lanes import Request
from embert.server.engine_worker.scheduler import LOW_PRIORITY_INTERVAL, Batch
from tests.server.engine_worker.schedulers import next_batch, scheduler_of

BUDGET, LONGEST = 1024, 300
SMALL = 32  # tokens: an eighth of a quarter of a batch

lengths_of_a_request = st.one_of(
    st.lists(st.integers(1, 20), min_size=1, max_size=2),
    st.lists(st.integers(1, LONGEST), min_size=1, max_size=40),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, batches, cancellations and deadlines, against a model of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = scheduler_of(BUDGET)
        self.clock = 0.0
        self.count = 0
        self.waiting: dict[int, list[tuple[int, int]]] = {}  # key → (text, tokens) not yet in a batch
        self.models: dict[int, str] = {}
        self.deadlines: dict[int, float] = {}
        self.low_priority: set[int] = set()
        self.small: set[int] = set()
        self.events = 0
        self.last: dict[Hashable, int] = {}  # the event of a request's last batch, or of its arrival
        self.passed: dict[Hashable, int] = {}  # batches of its lane without the request that waited longest
        self.batches_before_low_priority = 0

    @rule(
        lengths=lengths_of_a_request,
        model=st.sampled_from(["small", "small", "large"]),
        patience=st.integers(1, 8),
        low_priority=st.sampled_from([False, False, True]),
    )
    def add(self, lengths: list[int], model: str, patience: int, low_priority: bool) -> None:
        key = self.count
        self.count += 1
        self.waiting[key], self.models[key] = list(enumerate(lengths)), model
        self.deadlines[key] = self.clock + patience
        self.low_priority |= {key} if low_priority else set()
        self.small |= {key} if sum(lengths) <= SMALL else set()
        self.events += 1
        self.last[key] = self.events
        self.scheduler.add(Request(key, lengths, model, self.deadlines[key], low_priority))

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
        full = self.scheduler.full()
        waited = set(self.waiting)
        batch = self.scheduler.next_batch()
        if batch is None:
            assert not self.waiting
            return
        self._check_contents(batch)
        served = {piece.request.key for piece in batch.slices}
        candidates = {key for key in waited if self.models[key] == batch.model}
        interactive = candidates - self.low_priority
        low_priority_first = self._check_lanes(waited, interactive)
        leading = candidates & self.low_priority if low_priority_first else interactive
        self._check_nobody_is_passed_over(leading, served)
        assert not leading & self.small or leading & served, "a small request waited for nothing"
        self._check_little_more_fits(batch, leading if full and low_priority_first else interactive)
        self.events += 1
        self.last |= dict.fromkeys(served, self.events)

    def _check_lanes(self, waited: set[int], interactive: set[int]) -> bool:
        """Interactive requests go first, but every eighth time; whether it was that, or none were there."""
        low_priority_due = self.batches_before_low_priority == LOW_PRIORITY_INTERVAL - 1 and bool(
            waited & self.low_priority
        )
        low_priority_first = low_priority_due or waited <= self.low_priority
        if not low_priority_first:
            assert interactive, "low priority of one model went before interactive requests of another"
        self.batches_before_low_priority = (
            self.batches_before_low_priority + 1
            if not low_priority_first and self.low_priority & set(self.waiting)
            else 0
        )
        if not low_priority_due:  # low priority runs in what others left
            left = [self.waiting[key][0][1] for key in interactive if key in self.waiting]
            assert not left or max(left) > self.low_priority_tokens_run
        return low_priority_first

    def _check_nobody_is_passed_over(self, leading: set[int], served: set[Any]) -> None:
        """Whoever waits longest is in the batch, or in the next one if a quantum was going on in this one."""
        longest = min(self.last[key] for key in leading)
        for key in leading:
            if self.last[key] == longest and not any(self.last[each] == longest for each in served & leading):
                self.passed[key] = self.passed.get(key, 0) + 1
                assert self.passed[key] <= 1, "the one waiting longest got nothing"
        for key in served:
            self.passed.pop(key, None)

    def _check_contents(self, batch: Batch) -> None:
        assert batch.texts == sum(piece.stop - piece.start for piece in batch.slices)
        assert 1 <= batch.tokens <= BUDGET
        assert len({piece.request.key for piece in batch.slices}) == len(batch.slices)
        tokens = 0
        self.low_priority_tokens_run = sum(
            piece.tokens for piece in batch.slices if piece.request.key in self.low_priority
        )
        for piece in batch.slices:
            key = piece.request.key
            assert isinstance(key, int)
            assert self.models[key] == batch.model
            texts = self.waiting[key]
            taken, rest = texts[: piece.stop - piece.start], texts[piece.stop - piece.start :]
            # In order, none missing, none twice.
            assert [text for text, _ in taken] == list(range(piece.start, piece.stop))
            assert sum(length for _, length in taken) == piece.tokens
            tokens += piece.tokens
            if rest:
                self.waiting[key] = rest
            else:
                del self.waiting[key]
        assert tokens == batch.tokens

    def _check_little_more_fits(self, batch: Batch, lane: set[int]) -> None:
        """Bound late: the batch ends with a text, or a small request, that does not fit."""
        left = [sum(tokens for _, tokens in self.waiting[key]) for key in lane & self.small & set(self.waiting)]
        left += [self.waiting[key][0][1] for key in (lane - self.small) & set(self.waiting)]
        if left:
            assert batch.tokens + max(left) > BUDGET

    @invariant()
    def counters_are_right(self) -> None:
        assert self.scheduler.queue_texts == sum(map(len, self.waiting.values()))
        assert self.scheduler.queue_tokens == sum(tokens for texts in self.waiting.values() for _, tokens in texts)
        assert {request.key for request in self.scheduler.waiting()} == set(self.waiting)

    @invariant()
    def what_is_ahead_is_at_most_twice_what_runs_before(self) -> None:
        for model in ("small", "large"):
            sizes = {
                key: sum(tokens for _, tokens in texts)
                for key, texts in self.waiting.items()
                if self.models[key] == model
            }
            interactive = {key: tokens for key, tokens in sizes.items() if key not in self.low_priority}
            low_priority = {key: tokens for key, tokens in sizes.items() if key in self.low_priority}
            for tokens in (1, 50, 300, 10_000):
                exactly = self._before(interactive, tokens)
                assert exactly <= self.scheduler.ahead(model, tokens, low_priority=False) <= 2 * exactly
                exactly = sum(interactive.values()) + self._before(low_priority, tokens)
                assert exactly <= self.scheduler.ahead(model, tokens, low_priority=True) <= 2 * exactly
            assert self.scheduler.tokens_of(model, low_priority=True) == sum(sizes.values())
            assert self.scheduler.tokens_of(model, low_priority=False) == sum(interactive.values())

    def _before(self, sizes: dict[int, int], tokens: int) -> int:
        """Tokens of a lane that run before a new request of this size: of large ones only before another large one."""
        small = sum(size for key, size in sizes.items() if key in self.small)
        return small + sum(min(size, tokens) for key, size in sizes.items() if key not in self.small and tokens > SMALL)


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase


def test_everyone_has_a_quantum_before_anyone_has_two() -> None:
    """A large request of texts longer than a quantum included: what it takes too much, it pays back."""
    scheduler = scheduler_of(1000)
    for number in range(20):
        scheduler.add(Request(number, [[60] * 300, [400] * 45][number % 2]))
    tokens: dict[Any, int] = dict.fromkeys(range(20), 0)
    for _ in range(200):
        batch = next_batch(scheduler)
        for piece in batch.slices:
            tokens[piece.request.key] += piece.tokens
        assert max(tokens.values()) - min(tokens.values()) <= 250 + 400 + 60
    assert min(tokens.values()) > 6000


def test_half_of_a_batch_is_for_small_requests_while_large_ones_wait() -> None:
    scheduler = scheduler_of(1024)
    scheduler.add(Request("large", [64] * 100))
    for number in range(200):
        scheduler.add(Request(number, [16]))
    batch = next_batch(scheduler)
    assert [piece.request.key for piece in batch.slices] == [*range(32), "large"]
    assert batch.tokens == 1024


def test_texts_longer_than_half_of_a_batch_and_small_requests_alternate() -> None:
    scheduler = scheduler_of(1024)
    scheduler.add(Request("large", [1020] * 10))
    for number in range(200):
        scheduler.add(Request(number, [16]))
    batches = [scheduler.next_batch() for _ in range(6)]
    large = ["large" in {piece.request.key for piece in batch.slices} for batch in batches if batch is not None]
    assert large == [True, False] * 3


@pytest.mark.parametrize("lengths", [[0], [5, 401], [-3]])
def test_texts_that_no_batch_holds_are_refused(lengths: list[int]) -> None:
    scheduler = scheduler_of(100, longest_text=400)
    with pytest.raises(ValueError, match=f"{lengths[-1]} tokens"):
        scheduler.add(Request("x", lengths))


# --- texts that are longer than the token budget of a batch ---

SHORT_BUDGET, LONGEST_TEXT = 100, 400
long_requests = st.lists(st.integers(1, LONGEST_TEXT), min_size=1, max_size=10)


@given(st.lists(st.tuples(long_requests, st.booleans()), min_size=1, max_size=20))
def test_every_text_leaves_once_and_long_ones_by_themselves(requests: list[tuple[list[int], bool]]) -> None:
    scheduler = scheduler_of(SHORT_BUDGET, longest_text=LONGEST_TEXT)
    for key, (lengths, low_priority) in enumerate(requests):
        scheduler.add(Request(key, lengths, low_priority=low_priority))
    seen: dict[object, list[int]] = {key: [] for key in range(len(requests))}
    while (batch := scheduler.next_batch()) is not None:
        assert batch.texts == 1 or batch.tokens <= SHORT_BUDGET
        for piece in batch.slices:
            seen[piece.request.key] += range(piece.start, piece.stop)
    assert seen == {key: list(range(len(lengths))) for key, (lengths, _) in enumerate(requests)}


@pytest.mark.parametrize("others", [3, 256])
@pytest.mark.parametrize("low_priority", [False, True])
def test_a_long_text_is_not_starved_by_short_ones(others: int, *, low_priority: bool) -> None:
    scheduler = scheduler_of(SHORT_BUDGET, longest_text=LONGEST_TEXT)
    scheduler.add(Request("long", [LONGEST_TEXT], low_priority=low_priority))
    for batches in range(others * 20):
        for key in range(others):
            scheduler.add(Request((batches, key), [SHORT_BUDGET // others or 1]))
        scheduler.next_batch()
        if all(request.key != "long" for request in scheduler.waiting()):
            break
    assert batches <= 8  # a low-priority request waits for its quantum


COUNTS = TokenCounts(load_model().config)  # 2 304 tokens have as much attention as products
COUNTED_BUDGET = 2048


@given(
    st.lists(
        st.one_of(
            st.just("batch"),
            st.tuples(st.lists(st.sampled_from([5, 60, 400]), min_size=1, max_size=6), st.just(False)),
            st.tuples(st.lists(st.sampled_from([30, 900, 2000, 32_768]), min_size=1, max_size=3), st.just(True)),
        ),
        max_size=60,
    )
)
def test_no_two_long_texts_run_in_a_row_while_others_wait(steps: list[Any]) -> None:
    """A short text waits for the batch that is running, whatever long ones are queued."""
    scheduler = scheduler_of(COUNTED_BUDGET, longest_text=32_768, counts=COUNTS)
    waiting: dict[int, list[int]] = {}  # texts not yet in a batch
    has_long: set[int] = set()
    last_was_long = False
    for number, step in enumerate([*steps, *["batch"] * 500]):
        if step != "batch":
            lengths, _ = step
            waiting[number] = list(lengths)
            if max(COUNTS.of(lengths)) > COUNTED_BUDGET:
                has_long.add(number)
            scheduler.add(Request(number, lengths))
            continue
        others = {key for key in waiting if key not in has_long}
        ahead = scheduler.full()
        batch = scheduler.next_batch()
        if batch is None:
            break
        is_long = batch.counted > COUNTED_BUDGET
        assert not (is_long and last_was_long and others), "a long text passed another request twice"
        assert not (ahead and is_long), "a long text was to be submitted ahead"
        last_was_long = is_long
        lengths = [length for piece in batch.slices for length in piece.request.lengths[piece.start : piece.stop]]
        assert (batch.tokens, batch.counted) == (sum(lengths), sum(COUNTS.of(lengths)))
        assert batch.texts == 1 or batch.counted <= COUNTED_BUDGET
        for piece in batch.slices:
            taken = [waiting[cast("int", piece.request.key)].pop(0) for _ in range(piece.start, piece.stop)]
            assert taken == piece.request.lengths[piece.start : piece.stop]
        waiting = {key: texts for key, texts in waiting.items() if texts}
    assert not waiting
    assert (scheduler.queue_tokens, scheduler.queue_texts) == (0, 0)


def test_a_cancelled_long_request_leaves_nothing() -> None:
    scheduler = scheduler_of(COUNTED_BUDGET, longest_text=32_768, counts=COUNTS)
    scheduler.add(Request("long", [32_768, 10]))
    scheduler.add(Request("late", [20_000], deadline=1.0))
    assert scheduler.queue_tokens == sum(COUNTS.of([32_768, 10, 20_000]))
    assert {request.key for request in scheduler.waiting()} == {"long", "late"}
    assert [request.key for request in scheduler.expire(2.0)] == ["late"]
    assert scheduler.cancel("long") == 2
    assert (scheduler.queue_tokens, scheduler.next_batch()) == (0, None)
