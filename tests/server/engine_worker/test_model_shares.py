"""The scheduler with several models: shares of the device's time, and whose batch is next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable

from hypothesis import given
from hypothesis import strategies as st

from embert.server.engine_worker.lanes import Request
from embert.server.engine_worker.scheduler import Batch, Scheduler
from tests.server.engine_worker.schedulers import next_batch, scheduler_of


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
