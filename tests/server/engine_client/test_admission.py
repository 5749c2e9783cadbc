"""Admission by number of tokens and by time, and the errors of requests that cannot enter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embert.engine import Encoded, load_model
from embert.engine.models.flops import TokenCounts
from embert.server.config import ServeConfig
from embert.server.engine_client.admission import Admission, wait_s, work_within
from embert.server.engine_worker.lanes import BatchLimits, Request
from embert.server.engine_worker.throughput import ThroughputEstimate
from embert.server.http.errors import Overloaded, Unavailable
from embert.server.http.request_head import RequestOptions
from embert.server.ipc.channel import EngineStatus
from embert.server.ipc.control import EngineState, ModelInfo, ModelState
from embert.server.ipc.shared_counters import SharedCounters

INFO = ModelInfo("test", "cpu", "a test", "float32", "", 1000, 2, 2, 0.0, 0.1, 0.3)
READY = ModelState("ready", "", INFO)


@dataclass
class Engine:
    state: EngineState
    status: EngineStatus | None = None

    @property
    def running(self) -> frozenset[int]:
        return frozenset(number for number, model in self.state.models.items() if model.state == "ready")


def admissions_of(*engines: dict[int, float | None], **options: Any) -> list[Admission]:
    """Admissions of models that are called a, b, …: each engine has some, by number, at rates in tokens/s.

    None: the rates of this engine are not known yet.
    """
    models = 1 + max((number for rates in engines for number in rates), default=0)
    found: Any = {}
    for index, rates in enumerate(engines):
        known = [rates.get(number) or 0.0 for number in range(models)]
        status = None if None in rates.values() else EngineStatus(index, 0.0, 0, known)
        found[index] = Engine(EngineState(index, "ready", "", "/nonexistent", dict.fromkeys(rates, READY)), status)
    counters, config = SharedCounters.create(1, max(1, len(engines)), models), ServeConfig(**options)
    admissions = [
        Admission(config, counters, 0, found, number, "abc"[number] if models > 1 else "") for number in range(models)
    ]
    for admission in admissions:
        for engine in found.values():
            admission.note(engine.state)
    return admissions


def admission_of(rates: list[float | None], **options: Any) -> Admission:
    """Admission of one model on engines of these rates."""
    return admissions_of(*({0: rate} for rate in rates), **options)[0]


def asks(*, low_priority: bool = False, deadline: float = math.inf) -> RequestOptions:
    return RequestOptions(60.0, "--request-timeout", deadline, low_priority)


# --- the limit ---


@pytest.mark.parametrize(
    ("rates", "options", "tokens"),
    [
        ([1000.0], {}, 10_000),
        ([1000.0], {"max_queue_seconds": 3.5}, 3500),
        ([1000.0, 2500.0], {}, 35_000),  # engines work side by side
        ([1000.0, None], {}, 10_000),
        ([1000.0], {"max_queue_seconds": 0.0}, 256_000),  # only tokens
        ([None], {}, 256_000),  # nothing is known of the rate
        ([1e6], {}, 256_000),
        ([1000.0], {"max_queue_tokens": 5000}, 5000),
        ([0.1], {}, 2000),  # two batches, or the engine would wait for work
        ([0.1, 0.1], {"max_queue_seconds": 0.01}, 4000),
        ([0.1], {"max_queue_tokens": 50}, 50),
    ],
)
def test_the_smaller_of_tokens_and_time_holds(rates: list[float | None], options: dict[str, Any], tokens: int) -> None:
    assert admission_of(rates, **options).queue_limit == tokens


# --- one request ---


def test_long_texts_count_as_more_tokens_than_they_have() -> None:
    """The scheduler, whose rate sets the limit, counts the same."""
    admission = admission_of([1000.0])

    def counted(*lengths: int, prefix: int = 0) -> int:
        return admission.tokens_of(Encoded(np.zeros(sum(lengths), np.int32), np.array(lengths, np.int32), 0), prefix)

    assert counted(30, 50, 40, prefix=20) == 80
    assert counted(20_000, 3) == 20_003  # of a model without long texts
    admission.counts = TokenCounts(load_model().config)
    assert (counted(512), counted(500, 500)) == (512, 1000)
    assert counted(20_000, 3) == admission.counts.of([20_000])[0] + 3 > 100_000
    scheduled = Request("", [20_000, 900], prefix=800)
    BatchLimits(ThroughputEstimate(1000), 1000, 20_000, admission.counts).count(scheduled, 20_000)
    assert counted(20_000, 900, prefix=800) == scheduled.tokens


@pytest.mark.parametrize(
    ("options", "low_priority", "limit"),
    [
        ({"max_queue_tokens": 1000}, False, ("1000", "--max-queue-tokens")),
        ({"max_queue_tokens": 1000}, True, ("--max-queue-tokens", "75%")),
        ({"max_queue_seconds": 5.0}, False, ("5000", "--max-queue-seconds 5", "1000 tokens/s")),
    ],
)
def test_a_refusal_names_the_numbers(options: dict[str, Any], low_priority: bool, limit: tuple[str, ...]) -> None:
    admission = admission_of([1000.0], **options)
    admission.check(1_000_000, asks(low_priority=low_priority))  # into an empty queue, a request of any size enters
    capacity = int(admission.queue_limit * (0.75 if low_priority else 1.0))
    admission.add(capacity - 10)
    admission.check(10, asks(low_priority=low_priority))
    with pytest.raises(Overloaded) as refused:
        admission.check(11, asks(low_priority=low_priority))
    for value in (str(capacity - 10), "11", *limit):
        assert value in refused.value.message
    assert refused.value.retry_after_s == math.ceil((capacity - 10) / 1000)
    admission.add(10 - capacity)
    assert admission.admitted_tokens == 0
    admission.check(capacity + 1, asks(low_priority=low_priority))


def test_words_are_counted_only_where_the_upper_bound_does_not_fit() -> None:
    admission = admission_of([1000.0], max_queue_tokens=1000)
    admission.add(900)
    counted: list[int] = []

    def least() -> int:
        counted.append(90)
        return counted[-1]

    admission.check_capacity(least, 100, asks())
    assert not counted
    admission.check_capacity(least, 110, asks())
    assert counted == [90]
    admission.add(20)
    with pytest.raises(Overloaded, match=r"at least 90.*1000"):
        admission.check_capacity(least, 110, asks())
    with pytest.raises(Overloaded, match=r"90.*1000"):
        admission.check_capacity(least, 90, asks())


@pytest.mark.parametrize("low_priority", [False, True])
def test_a_large_request_neither_needs_an_empty_queue_nor_fills_it(low_priority: bool) -> None:
    admission = admission_of([1000.0], max_queue_tokens=1000)
    admission.add(300)  # of a few others
    assert admission.check(1_000_000, asks(low_priority=low_priority)) == 125
    admission.check_capacity(lambda: 1_000_000, 1_000_000, asks(low_priority=low_priority))
    admission.add(125)
    assert admission.check(3, asks()) == 3


@given(st.lists(st.tuples(st.integers(1, 10_000), st.booleans(), st.booleans()), max_size=60), st.integers(8, 100_000))
def test_no_client_fills_the_queue_for_others(requests: list[tuple[int, bool, bool]], limit: int) -> None:
    """Large and low-priority requests hold their part at most, and small ones enter until the queue is full."""
    admission = admission_of([1e9], max_queue_tokens=limit)
    small = max(1, limit // 8)
    entered: list[int] = []
    for tokens, low_priority, leaves in requests:
        if leaves and entered:
            admission.add(-entered.pop(0))
        try:
            counted = admission.check(tokens, asks(low_priority=low_priority))
        except Overloaded:
            assert admission.admitted_tokens > 0
            assert admission.admitted_tokens + 2 * min(tokens, small) > (0.75 if low_priority else 1.0) * limit - 1
            continue
        assert counted == min(tokens, small)
        admission.add(counted)
        entered.append(counted)
        assert admission.admitted_tokens <= limit
        if tokens > small:
            assert admission.admitted_tokens <= limit - limit // 8


def test_a_server_that_is_not_ready_responds_503() -> None:
    admission = admission_of([])
    with pytest.raises(Unavailable, match="starting") as refused:
        admission.check(1, asks())
    assert (refused.value.retry_after_s, refused.value.reject_reason) == (2, "loading")
    admission = admission_of([1000.0])
    assert "connecting" in admission.unready_reason()
    with pytest.raises(Unavailable, match=r"60 s .*--request-timeout") as refused:
        admission.check(1, asks(deadline=0.0))
    assert refused.value.reject_reason == "deadline"
    admission.draining = True
    with pytest.raises(Unavailable, match="shutting down") as refused:
        admission.check(1, asks())
    assert (refused.value.retry_after_s, refused.value.reject_reason) == (1, "draining")
    admission.check_capacity(lambda: 1, 1, asks())  # which leaves it to `check`


# --- several models ---


SECONDS = st.floats(0.0, 1e6)


@given(limit=SECONDS, others=st.lists(SECONDS, max_size=6))
def test_the_most_work_takes_as_long_as_the_limit(limit: float, others: list[float]) -> None:
    work = work_within(limit, others)
    assert math.isclose(wait_s(work, others), limit, abs_tol=1e-6)
    assert limit / (1 + len(others)) <= work * (1 + 1e-9) + 1e-9
    assert work <= limit


def test_a_flood_of_one_model_leaves_capacity_to_others() -> None:
    a, b = admissions_of({0: 1000.0, 1: 500.0})
    assert (a.max_queue_tokens, b.max_queue_tokens) == (256_000, 256_000)
    assert (a.queue_limit, b.queue_limit) == (10_000, 5_000)
    a.add(1_000_000)
    assert b.queue_limit == 2500  # half of the time is its own
    b.check(1_000_000, asks())
    b.add(2400)
    b.check(100, asks())
    with pytest.raises(Overloaded) as refused:
        b.check(101, asks())
    for value in ("b ", "2400", "101", "2500", "--max-queue-seconds 10", "500 tokens/s"):
        assert value in refused.value.message
    assert refused.value.retry_after_s == 10  # 4.8 s of this model's work, and as much of the other's
    a.add(-1_000_000 + 1000)  # a second of work
    assert b.queue_limit == 4500


def test_only_known_work_of_the_same_engine_takes_time() -> None:
    a, b, c = admissions_of({0: 1000.0, 2: 1000.0}, {1: 1000.0})
    b.add(1_000_000)
    assert (a.queue_limit, c.queue_limit) == (10_000, 10_000)
    c.add(2000)
    assert (a.queue_limit, b.queue_limit) == (8000, 10_000)
    a, b = admissions_of({0: 1000.0, 1: 0.0})
    b.add(1_000_000)  # at a rate that is not known
    assert (a.queue_limit, b.queue_limit) == (10_000, 256_000)


def test_a_model_always_has_two_batches_of_each_engine() -> None:
    a, b = admissions_of({0: 0.1, 1: 1000.0}, {0: 0.1})
    b.add(1_000_000)
    assert a.queue_limit == 4000
    assert a.max_queue_tokens == 512_000


def test_the_budget_is_that_of_the_engines_which_have_the_model() -> None:
    """Also of those whose batch is not known yet, and not of those on which it has failed."""
    loading, failed = ModelState("loading"), ModelState("failed", "out of memory")
    admission = Admission(ServeConfig(), SharedCounters.create(1, 4), 0, {}, 1, "b")
    for index, state, tokens in (
        (0, {1: loading}, 0),
        (1, {0: loading}, 0),
        (2, {1: loading}, 0),
        (0, {1: READY}, 512_000),
        (2, {1: failed}, 256_000),
        (0, {1: loading}, 256_000),  # as after a restart
        (0, {}, 256_000),
    ):
        admission.note(EngineState(index, "loading", "", "", state))
        assert admission.max_queue_tokens == tokens
    assert admission.was_ready


@pytest.mark.parametrize(
    ("models", "failed", "says"),
    [
        ([{0: READY, 1: ModelState("failed", "out of memory")}], True, "b has failed (failed: out of memory)"),
        (
            [{1: ModelState("failed", "out of memory")}, {1: ModelState("loading", "weights")}],
            False,
            "b is not ready (failed: out of memory; loading: weights)",
        ),
        ([{0: READY}, {1: ModelState("loading")}], False, "b is not ready (loading)"),
        (
            [{1: ModelState("loading", "loading the weights, 3.1 of 15.2 GB")}],
            False,
            "b is not ready (loading the weights, 3.1 of 15.2 GB)",
        ),
        ([{1: ModelState("failed", "out of memory")}, {}], False, "b is not ready (failed: out of memory; ready)"),
    ],
)
def test_a_model_that_has_failed_says_why(models: list[dict[int, ModelState]], failed: bool, says: str) -> None:
    engines: Any = {index: Engine(EngineState(index, "ready", "", "", each)) for index, each in enumerate(models)}
    admission = Admission(ServeConfig(), SharedCounters.create(1, 2, 2), 0, engines, 1, "b")
    assert (admission.ready, admission.failed) == (False, failed)
    with pytest.raises(Unavailable) as refused:
        admission.check(1, asks())
    assert (refused.value.message, refused.value.retry_after_s) == (says, None if failed else 2)
