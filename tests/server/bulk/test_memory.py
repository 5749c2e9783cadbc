"""Memory does not grow with the length of the input."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil

from tests.server.bulk.running import started

FEW, MANY = 10_000, 70_000  # the fewer fill every slot, and with their numbers the cache of words
GROWTH_BYTES = 32 << 20  # of all processes together, for their allocators; the vectors between are 92 MB


def peak(texts: Path, target: Path) -> int:
    """Bytes that each process of a run had resident at most, added up. A buffer counts in each that looks into it."""
    peaks: dict[int, int] = {}
    with started(["-f", texts, "-o", target], {"STAND_IN_ORDERS": "no"}) as process:
        command = psutil.Process(process.pid)
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in [command, *command.children()]:
                    peaks[each.pid] = max(peaks.get(each.pid, 0), each.memory_info().rss)
            time.sleep(0.05)
        assert process.returncode == 0
    assert len(peaks) >= 3, "the run itself, its engine and its tokenization process"
    return sum(peaks.values())


def test_memory_is_flat(tmp_path: Path) -> None:
    found, name = {}, "vectors.parquet"
    for count in (FEW, MANY):
        texts = tmp_path / f"{count}.txt"
        texts.write_text(
            "".join(f"number {number % 2_000} of the texts that are embedded\n" for number in range(count))
        )
        found[count] = peak(texts, tmp_path / name)
        (tmp_path / name).unlink()
    assert found[MANY] < found[FEW] + GROWTH_BYTES, found
