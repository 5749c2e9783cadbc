"""The engine's reports: progress of loading, throughput and busy time."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embert.server.engine_worker.process import LoadProgress
from embert.server.engine_worker.throughput import BusyTime, ThroughputEstimate

BATCH = 2048
FIXED_S, TOKEN_S = 0.003, 0.0002  # MiniLM on two CPU cores


def calibrated(fixed_s: float = FIXED_S, token_s: float = TOKEN_S, tokens: int = BATCH) -> ThroughputEstimate:
    estimate = ThroughputEstimate(tokens)
    estimate.calibrate(fixed_s, token_s)
    return estimate


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 2 * BATCH)), max_size=60))
def test_what_is_learned_is_bounded(batches: list[tuple[float, int]]) -> None:
    """Whatever is measured: half of the calibrated time at least, and at most what a batch has taken."""
    estimate = calibrated()
    for seconds, tokens in batches:
        estimate.add_batch(seconds, tokens)
        estimate.note_prediction(too_long=False)
        longest_s = max([FIXED_S, *(each for each, _ in batches)])
        assert FIXED_S / 2 <= estimate.fixed_s <= FIXED_S + 3 * longest_s
        assert 0 < estimate.tokens_per_s <= 2 / TOKEN_S
        assert estimate.expected_s(500) <= FIXED_S + 500 * TOKEN_S + 1e-9


def teaches_both(sizes: list[int]) -> bool:
    """True for sizes that differ much. If all are small, the first estimate of a full batch still counts."""
    return max(sizes) > max(8 * min(sizes), BATCH // 16)


@given(
    st.floats(0.5, 20), st.floats(0.5, 20), st.lists(st.integers(1, BATCH), min_size=2, max_size=5).filter(teaches_both)
)
def test_the_fixed_time_and_that_of_a_token_are_learned(fixed: float, token: float, sizes: list[int]) -> None:
    estimate = calibrated()
    for _ in range(80):
        for tokens in sizes:
            estimate.add_batch(fixed * FIXED_S + token * TOKEN_S * tokens, tokens)
    for tokens in sizes:
        assert estimate.seconds(tokens) == pytest.approx(fixed * FIXED_S + token * TOKEN_S * tokens, rel=0.15)


@pytest.mark.parametrize("tokens", [3, 12, 40, 200])
def test_short_batches_say_nothing_of_full_ones(tokens: int) -> None:
    """Their fixed time is ten times what it was, as next to busy HTTP processes."""
    rng, estimate = Random(7), calibrated()
    rate = estimate.tokens_per_s
    for _ in range(3000):
        tokens_now = rng.randint(max(1, tokens // 2), tokens)
        estimate.add_batch(rng.choice([0.02, 0.03, 0.04]) + tokens_now * TOKEN_S, tokens_now)
    assert estimate.fixed_s == pytest.approx(0.03, rel=0.5)
    assert estimate.tokens_per_s == pytest.approx(rate, rel=0.25)


def test_a_slower_machine_is_noticed_and_a_pause_hardly() -> None:
    estimate = calibrated()
    rate, full_s = estimate.tokens_per_s, FIXED_S + BATCH * TOKEN_S
    for _ in range(20):
        estimate.add_batch(full_s, BATCH)
    estimate.add_batch(60.0, BATCH)
    assert estimate.tokens_per_s > 0.9 * rate
    for number in range(30):
        estimate.add_batch(4 * full_s, BATCH - number)
    assert estimate.tokens_per_s == pytest.approx(rate / 4, rel=0.2)
    for number in range(60):
        estimate.add_batch(full_s, BATCH - number)
    assert estimate.tokens_per_s == pytest.approx(rate, rel=0.1)


def test_a_batch_handed_over_ahead_begins_when_the_one_before_ends() -> None:
    busy = BusyTime()
    assert busy.add(0.0, 1.0) == 1.0
    assert busy.add(0.5, 2.0) == 1.0  # waited for the first
    assert busy.last_ended == 2.0


def test_the_busy_part_of_a_window() -> None:
    busy = BusyTime()
    busy.add(0.0, 1.0)
    busy.add(3.0, 4.0)
    assert busy.ratio(5.0) == pytest.approx(0.4)


def test_progress_is_reported_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, steps = 100.0, list[str]()
    monkeypatch.setattr("embert.server.engine_worker.process.time", SimpleNamespace(monotonic=lambda: now))
    progress = LoadProgress(steps.append)
    for gigabytes in range(15):
        now += 0.4
        progress(gigabytes * 10**9, 15_200_000_000)
    assert steps == [f"loading the weights, {gigabytes}.0 of 15.2 GB" for gigabytes in (2, 5, 8, 11, 14)]
