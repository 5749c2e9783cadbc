"""Attention with a window: which steps of keys a tile reads, and which keys a query sees (attention/window.h)."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.csrc.host_program import build, output_of

LENGTHS, WINDOWS = (33, 64, 65, 200, 1000, 8192), (1, 7, 31, 40, 63, 64, 65, 128, 500)
TILES = ((64, 64), (16, 64), (8, 32))  # queries, keys: of a block, of a warp, in FP32


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("windows"), Path(__file__).with_name("windows.cpp"))


def test_a_tile_reads_the_steps_that_a_query_sees_something_of(program: Path) -> None:
    cases = [
        (length, window, after, query, queries, keys)
        for length, window, (queries, keys) in itertools.product(LENGTHS, WINDOWS, TILES)
        for after in (window, 0)
        for query in sorted({0, *(at // queries * queries for at in (length // 3, length - 1, length + 100))})
    ]
    lines = [
        list(map(int, line.split())) for line in output_of(program, "steps", *itertools.chain(*cases)).splitlines()
    ]
    for (length, window, after, query, queries, keys), (first, end), all_seen in zip(
        cases, lines[::2], lines[1::2], strict=True
    ):
        rows = np.arange(query, query + queries)
        distances = np.arange(-(-length // keys) * keys) - rows[:, None]  # past the end, too
        seen = (-window <= distances) & (distances <= after)
        real = seen[:, :length].any(axis=0)
        steps = np.flatnonzero(real) // keys if real.any() else np.array([(length - 1) // keys])
        assert (first, end - 1) == (steps.min(), steps.max())
        of_steps = [bool(seen[:, step * keys : (step + 1) * keys].all()) for step in range(first, end)]
        assert [bool(each) for each in all_seen] == of_steps


def test_a_query_sees_its_window_within_its_text(program: Path) -> None:
    """On Hopper: the comparison that its masks make, and the steps without one."""
    cases = [
        (length, query, window, after)
        for length in (33, 64, 65, 95, 96, 97, 128, 129, 200, 257, 511, 8192)
        for window in (31, 32, 63, 64, 65, 100, 128, 300)
        for after in (window, 0)
        for query in sorted({*range(0, 300, 16), (length - 1) // 16 * 16})
    ]
    lines = iter(output_of(program, "keys", *itertools.chain(*cases)).splitlines())
    for length, query, window, after in cases:
        for row in range(query, query + 16):
            wanted = range(max(0, row - window), min(length, row + after + 1))
            assert [int(key) for key in next(lines).split()] == list(wanted), (length, row, window)
        assert not next(lines)
