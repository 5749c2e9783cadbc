"""The engine's account of itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embert.server.worker.throughput import ThroughputEstimate


def test_nothing_is_expected_of_the_unknown() -> None:
    assert ThroughputEstimate().expected_end(7.0, 100) == 7.0


def test_a_batch_is_expected_to_take_what_was_learned() -> None:
    estimate = ThroughputEstimate()
    estimate.calibrate(0.001, 1e-6)
    assert estimate.expected_end(7.0, 500) == pytest.approx(7.0015)


@given(st.lists(st.floats(0, 10), max_size=60))
def test_no_batch_makes_longer_ones_be_expected(lasted_s: list[float]) -> None:
    estimate, now = ThroughputEstimate(), 100.0
    estimate.calibrate(0.001, 1e-6)
    for seconds in lasted_s:
        estimate.add_batch(now, now + seconds, 100, queued=False)
        estimate.note_prediction(too_long=False)
        now += seconds
    assert estimate.expected_end(now, 500) - now <= 0.0015 + 1e-9


def test_a_batch_handed_over_ahead_begins_when_the_one_before_ends() -> None:
    estimate = ThroughputEstimate()
    estimate.calibrate(0.5, 0.005)
    estimate.add_batch(0.0, 1.0, 100, queued=True)
    estimate.add_batch(0.5, 2.0, 100, queued=True)  # waited for the first
    assert estimate.expected_end(1.7, 100) == pytest.approx(3.0)


def test_batches_found_ended_are_expected_to_be_shorter_for_a_while() -> None:
    estimate = ThroughputEstimate()
    estimate.calibrate(0.02, 0.0)
    for _ in range(9):
        estimate.note_prediction(too_long=True)
    assert estimate.expected_end(7.0, 100) < 7.001
    for _ in range(200):
        estimate.note_prediction(too_long=False)
    assert estimate.expected_end(7.0, 100) == pytest.approx(7.02)


def test_the_rate_is_that_of_batches_that_left_others_waiting() -> None:
    estimate = ThroughputEstimate()
    estimate.add_batch(0.0, 1.0, 1000, queued=True)
    estimate.add_batch(5.0, 5.5, 10, queued=False)  # small ones are slow for their size
    assert estimate.tokens_per_s == pytest.approx(1000)


def test_a_rate_that_a_pause_has_made_too_low_recovers_though_nobody_has_to_wait() -> None:
    """A queue that is kept short because of the rate would otherwise keep the rate."""
    estimate, now = ThroughputEstimate(), 10.0
    estimate.calibrate(0.0, 0.001)
    estimate.add_batch(0.0, now, 100, queued=True)
    assert estimate.tokens_per_s == pytest.approx(10)
    for _ in range(60):
        estimate.add_batch(now, now + 0.1, 100, queued=False)
        now += 0.1
    assert estimate.tokens_per_s == pytest.approx(1000, rel=0.2)


def test_a_batch_that_seems_to_be_over_sooner_than_possible_does_not_raise_the_rate() -> None:
    estimate = ThroughputEstimate()
    estimate.calibrate(0.01, 0.001)
    estimate.add_batch(0.0, 1.0, 1000, queued=True)
    for number in range(100):  # looked for late, they seem to have begun late
        estimate.add_batch(2.0 + number, 2.000001 + number, 1000, queued=False)
    assert estimate.tokens_per_s <= 1000


def test_the_busy_part_of_a_window() -> None:
    estimate = ThroughputEstimate()
    estimate.add_batch(0.0, 1.0, 10, queued=True)
    estimate.add_batch(3.0, 4.0, 10, queued=True)
    assert estimate.busy_ratio(5.0) == pytest.approx(0.4)
    assert estimate.tokens_per_s == pytest.approx(10, rel=0.01)
