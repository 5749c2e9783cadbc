"""The cost of a batch is in proportion to its content, not to the queue. Lines are counted, not time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embert.server.engine_worker import scheduler
from embert.server.engine_worker.lanes import Request
from tests.server.engine_worker.schedulers import scheduler_of

CODE = Path(scheduler.__file__).parent


def lines_run(work: Callable[[], Any]) -> int:
    """Lines of the scheduler's code that this runs: what it costs, on any machine."""
    lines = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if Path(frame.f_code.co_filename).parent != CODE:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("lengths", [[12], [104] * 32])
def test_what_a_batch_costs_does_not_grow_with_the_queue(lengths: list[int]) -> None:
    def cost(requests: int) -> int:
        scheduler = scheduler_of(2048)
        for number in range(requests):
            model, low_priority = "small" if number % 2 else "large", number % 3 == 0
            scheduler.add(Request(number, lengths, model, 100.0 + number, low_priority))

        def three_batches() -> None:
            for _ in range(3):
                assert scheduler.full()
                assert scheduler.expire(50.0) == []
                assert scheduler.next_batch() is not None

        return lines_run(three_batches)

    assert cost(20_000) <= 1.5 * cost(2000)
