"""The engine's account of itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embert.server.worker.scheduling.throughput import BusyTime, ThroughputEstimate


def test_nothing_is_expected_of_the_unknown() -> None:
    assert ThroughputEstimate().expected_s(100) == 0.0


def test_a_batch_is_expected_to_take_what_was_learned() -> None:
    estimate = ThroughputEstimate()
    estimate.calibrate(0.001, 1e-6)
    assert estimate.expected_s(500) == estimate.shortest_s(500) == pytest.approx(0.0015)


@given(st.lists(st.floats(0, 10), max_size=60))
def test_no_batch_makes_longer_ones_be_expected(lasted_s: list[float]) -> None:
    estimate = ThroughputEstimate()
    estimate.calibrate(0.001, 1e-6)
    for seconds in lasted_s:
        estimate.add_batch(seconds, 100, queued=False)
        estimate.note_prediction(too_long=False)
    assert estimate.expected_s(500) <= 0.0015 + 1e-9


def test_a_batch_handed_over_ahead_begins_when_the_one_before_ends() -> None:
    busy = BusyTime()
    assert busy.add(0.0, 1.0) == 1.0
    assert busy.add(0.5, 2.0) == 1.0  # waited for the first
    assert busy.last_ended == busy.total_s == 2.0


def test_batches_found_ended_are_expected_to_be_shorter_for_a_while() -> None:
    estimate = ThroughputEstimate()
    estimate.calibrate(0.02, 0.0)
    for _ in range(9):
        estimate.note_prediction(too_long=True)
    assert estimate.expected_s(100) < 0.001
    for _ in range(200):
        estimate.note_prediction(too_long=False)
    assert estimate.expected_s(100) == pytest.approx(0.02)


def test_the_rate_is_that_of_batches_that_left_others_waiting() -> None:
    estimate = ThroughputEstimate()
    estimate.add_batch(1.0, 1000, queued=True)
    estimate.add_batch(0.5, 10, queued=False)  # small ones are slow for their size
    assert estimate.tokens_per_s == pytest.approx(1000)


def test_a_rate_that_a_pause_has_made_too_low_recovers_though_nobody_has_to_wait() -> None:
    """A queue that is kept short because of the rate would otherwise keep the rate."""
    estimate = ThroughputEstimate()
    estimate.calibrate(0.0, 0.001)
    estimate.add_batch(10.0, 100, queued=True)
    assert estimate.tokens_per_s == pytest.approx(10)
    for _ in range(60):
        estimate.add_batch(0.1, 100, queued=False)
    assert estimate.tokens_per_s == pytest.approx(1000, rel=0.2)


def test_a_batch_that_seems_to_be_over_sooner_than_possible_does_not_raise_the_rate() -> None:
    estimate = ThroughputEstimate()
    estimate.calibrate(0.01, 0.001)
    estimate.add_batch(1.0, 1000, queued=True)
    for _ in range(100):  # looked for late, they seem to have begun late
        estimate.add_batch(1e-6, 1000, queued=False)
    assert estimate.tokens_per_s <= 1000


def test_the_busy_part_of_a_window() -> None:
    busy = BusyTime()
    busy.add(0.0, 1.0)
    busy.add(3.0, 4.0)
    assert busy.ratio(5.0) == pytest.approx(0.4)
