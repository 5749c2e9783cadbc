"""The engine's account of itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.pace import Pace


def test_nothing_is_expected_of_the_unknown() -> None:
    assert Pace().expected_end(7.0, 100) == 7.0


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=60), st.floats(0, 0.01), st.floats(1e-8, 1e-5))
def test_a_steady_encoder_s_batches_end_when_expected(sizes: list[int], rest_s: float, token_s: float) -> None:
    pace, now = Pace(), 100.0
    for tokens in sizes:
        now += rest_s + tokens * token_s
        pace.add(now - rest_s - tokens * token_s, now, tokens, queued=False)
    lasts_s = pace.expected_end(now, sizes[-1]) - now
    if len(set(sizes)) == 1:
        assert lasts_s == pytest.approx(rest_s + sizes[-1] * token_s, rel=1e-3, abs=1e-6)
    elif max(sizes) > 2 * min(sizes):
        assert lasts_s == pytest.approx(rest_s + sizes[-1] * token_s, rel=0.2, abs=1e-4)


def test_a_batch_handed_over_ahead_begins_when_the_one_before_ends() -> None:
    pace = Pace()
    pace.add(0.0, 1.0, 100, queued=True)
    pace.add(0.5, 2.0, 100, queued=True)  # waited for the first: took one second
    assert pace.expected_end(1.7, 100) == pytest.approx(3.0)


def test_the_busy_part_of_a_window() -> None:
    pace = Pace()
    pace.add(0.0, 1.0, 10, queued=True)
    pace.add(3.0, 4.0, 10, queued=True)
    assert pace.busy_ratio(5.0) == pytest.approx(0.4)
    assert pace.tokens_per_s == pytest.approx(10, rel=0.01)
