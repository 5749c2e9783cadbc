"""The scheduler and texts that are longer than the token budget of a batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embert.server.engine_worker.lanes import Request
from tests.server.engine_worker.schedulers import scheduler_of

BUDGET, LONGEST = 100, 400
lengths_of_a_request = st.lists(st.integers(1, LONGEST), min_size=1, max_size=10)


@given(st.lists(st.tuples(lengths_of_a_request, st.booleans()), min_size=1, max_size=20))
def test_every_text_leaves_once_and_long_ones_alone(requests: list[tuple[list[int], bool]]) -> None:
    scheduler = scheduler_of(BUDGET, longest_text=LONGEST)
    for key, (lengths, low_priority) in enumerate(requests):
        scheduler.add(Request(key, lengths, low_priority=low_priority))
    seen: dict[object, list[int]] = {key: [] for key in range(len(requests))}
    while (batch := scheduler.next_batch()) is not None:
        assert batch.texts == 1 or batch.tokens <= BUDGET
        for piece in batch.slices:
            seen[piece.request.key] += range(piece.start, piece.stop)
    assert seen == {key: list(range(len(lengths))) for key, (lengths, _) in enumerate(requests)}


@pytest.mark.parametrize("others", [3, 256])
@pytest.mark.parametrize("low_priority", [False, True])
def test_a_long_text_is_not_starved_by_short_ones_without_end(others: int, *, low_priority: bool) -> None:
    scheduler = scheduler_of(BUDGET, longest_text=LONGEST)
    scheduler.add(Request("long", [LONGEST], low_priority=low_priority))
    for batches in range(others * 20):
        for key in range(others):
            scheduler.add(Request((batches, key), [BUDGET // others or 1]))
        scheduler.next_batch()
        if "long" not in scheduler.waiting():
            break
    assert batches <= 8  # a low-priority request waits for its quantum


def test_a_text_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="401 tokens cannot be in a batch of 1 to 400"):
        scheduler_of(BUDGET, longest_text=LONGEST).add(Request("x", [LONGEST + 1]))
