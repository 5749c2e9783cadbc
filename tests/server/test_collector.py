"""Garbage collection in a process that answers requests: never over what it started with."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc, time
from server import collector
collector.begin()
import server.app  # a few hundred thousand objects
collector.settle()
began = time.perf_counter()
gc.collect()
took = time.perf_counter() - began
gc.unfreeze()
began = time.perf_counter()
gc.collect()
print(gc.get_threshold()[0], took / (time.perf_counter() - began))
"""


def test_what_a_process_starts_with_is_not_looked_at_again() -> None:
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    young, share = ran.stdout.split()
    assert int(young) <= 5_000
    assert float(share) < 0.1
