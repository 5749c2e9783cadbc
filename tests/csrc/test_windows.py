"""Which steps of keys a tile of attention with a window reads, and in which of them nothing has to be hidden."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import numpy as np

from tests.csrc.host_program import build

LENGTHS, WINDOWS = (33, 64, 65, 200, 1000, 8192), (1, 7, 31, 40, 63, 64, 65, 128, 500)
TILES = ((64, 64), (16, 64), (8, 32))  # queries, keys: of a block, of a warp, in FP32


def test_a_tile_reads_the_steps_that_a_query_sees_something_of(tmp_path: Path) -> None:
    cases = [
        (length, window, query, queries, keys)
        for length, window, (queries, keys) in itertools.product(LENGTHS, WINDOWS, TILES)
        for query in sorted({0, length // 3 // queries * queries, (length - 1) // queries * queries})
    ]
    program = build(tmp_path, Path(__file__).with_name("windows.cpp"))
    told = subprocess.run([program, *(str(i) for case in cases for i in case)], capture_output=True, check=True).stdout
    lines = [list(map(int, line.split())) for line in told.decode().splitlines()]
    for (length, window, query, queries, keys), (first, end), all_seen in zip(
        cases, lines[::2], lines[1::2], strict=True
    ):
        rows = np.arange(query, query + queries)
        seen = abs(np.arange(-(-length // keys) * keys) - rows[:, None]) <= window  # past the end, too
        real = seen[:, :length].any(axis=0)
        steps = np.flatnonzero(real) // keys
        assert (first, end - 1) == (steps.min(), steps.max())
        of_steps = [bool(seen[:, step * keys : (step + 1) * keys].all()) for step in range(first, end)]
        assert [bool(each) for each in all_seen] == of_steps
