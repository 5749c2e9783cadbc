"""Which keys Hopper's attention sees within a window: the comparison that its masks make, and the steps without one."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.csrc.host_program import build

CASES = [
    (length, query, window)
    for length in (33, 64, 65, 95, 96, 97, 128, 129, 200, 257, 511, 8192)
    for window in (31, 32, 63, 64, 65, 100, 128, 300)
    for query in sorted({*range(0, min(length, 300), 16), (length - 1) // 16 * 16})
]


def test_a_query_sees_its_window_within_its_text(tmp_path: Path) -> None:
    program = build(tmp_path, Path(__file__).with_name("key_windows.cpp"))
    numbers = [str(number) for case in CASES for number in case]
    said = subprocess.run([program, *numbers], capture_output=True, text=True, check=True).stdout
    for (length, query, window), part in zip(CASES, said.split("\n\n"), strict=False):
        lines = part.splitlines()
        rows = range(query, min(query + 16, length))
        assert len(lines) == len(rows)
        for row, line in zip(rows, lines, strict=True):
            wanted = range(max(0, row - window), min(length, row + window + 1))
            assert [int(key) for key in line.split()] == list(wanted), (length, row, window)
