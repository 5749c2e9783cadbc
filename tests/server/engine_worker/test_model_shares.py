"""The scheduler with several models: shares of the device's time, and whose batch is next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embert.server.engine_worker.lanes import Request
from embert.server.engine_worker.scheduler import LOW_PRIORITY_INTERVAL, Batch, Scheduler
from tests.server.engine_worker.schedulers import next_batch, scheduler_of


@pytest.mark.parametrize("low_priority_model", ["small", "large"])
def test_interactive_requests_of_any_model_go_before_low_priority_ones(low_priority_model: str) -> None:
    """Even low-priority requests that came first; they lead one batch of eight, so that they progress."""
    scheduler = scheduler_of(2048)
    scheduler.add(Request("bulk", [200] * 500, low_priority_model, low_priority=True))
    for number in range(400):
        scheduler.add(Request(number, [12] * 20, "small"))
    led_by_low_priority = []
    for _ in range(4 * LOW_PRIORITY_INTERVAL):
        batch = next_batch(scheduler)
        led_by_low_priority.append("bulk" in {piece.request.key for piece in batch.slices})
    assert led_by_low_priority == ([False] * (LOW_PRIORITY_INTERVAL - 1) + [True]) * 4


def test_small_batches_of_a_model_do_not_hold_up_another() -> None:
    """A batch takes time however small it is, so shares are not counted only by tokens."""
    scheduler = scheduler_of(1000, fixed_s=125.0, token_s=0.875)
    scheduler.add(Request("large", [100] * 1000, "large"))
    in_a_row = longest = 0
    for number in range(100):
        scheduler.add(Request(number, [5], "small"))
        batch = next_batch(scheduler)
        in_a_row = in_a_row + 1 if batch.model == "small" else 0
        longest = max(longest, in_a_row)
    assert 1 <= longest <= 8


def test_a_model_that_was_away_has_nothing_to_make_up_for() -> None:
    scheduler = scheduler_of(100)
    for number in range(50):
        scheduler.add(Request(("small", number), [100], "small"))
        assert scheduler.next_batch() is not None
    for number in range(10):
        for model in ("large", "small"):
            scheduler.add(Request((model, "again", number), [100], model))
    models = [batch.model for batch in (scheduler.next_batch() for _ in range(20)) if batch is not None]
    assert all(set(pair) == {"small", "large"} for pair in zip(models[::2], models[1::2], strict=True))


def run(scheduler: Scheduler, took_s: Callable[[Batch], float], until_s: float) -> dict[Hashable, float]:
    """Device time of each model, when batches take this long."""
    spent: defaultdict[Hashable, float] = defaultdict(float)
    while sum(spent.values()) < until_s:
        batch = next_batch(scheduler)
        spent[batch.model] += took_s(batch)
        scheduler.settle(batch, took_s(batch))
    return dict(spent)


@given(st.floats(0.3, 7), st.floats(0.3, 7), st.booleans())
def test_models_share_the_devices_time_whatever_their_batches_take(
    small: float, large: float, low_priority: bool
) -> None:
    """Up to what one batch takes; expectations that are wrong by a factor are corrected by what batches took."""
    scheduler = scheduler_of(100, token_s=1.0)
    for model in ("small", "large"):
        for number in range(3):
            scheduler.add(Request((model, number), [20] * 2000, model, low_priority=low_priority))
    wrong_by = {"small": small, "large": large}
    spent = run(scheduler, lambda batch: batch.tokens * wrong_by[str(batch.model)], until_s=20_000)
    assert abs(spent["small"] - spent["large"]) <= 100 * (small + large)


def test_a_machine_that_slept_does_not_make_a_model_wait_for_as_long() -> None:
    scheduler = scheduler_of(100, token_s=1.0)
    for model in ("small", "large"):
        scheduler.add(Request(model, [100] * 1000, model))
    asleep = next_batch(scheduler)
    scheduler.settle(asleep, 1e6)
    following = [batch.model for batch in (scheduler.next_batch() for _ in range(12)) if batch is not None]
    assert asleep.model in following
