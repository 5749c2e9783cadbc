"""What is noticed beside the connections."""

from __future__ import annotations

import subprocess
import sys

from tests.fuzz.surroundings import footprint, grown, settled, tracebacks

LIMIT = 50_000_000


def test_memory_that_stays_is_noticed() -> None:
    wait = "print(flush=True); sys.stdin.readline()"
    program = f"import sys; {wait}; held = b'x' * 80_000_000; {wait}"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        before = footprint(process.pid)
        assert grown(before, footprint(process.pid), LIMIT) == []
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        (fault,) = settled(lambda: footprint(process.pid), before, LIMIT, 0.0)
        assert f"process {process.pid} holds " in fault


def test_memory_that_is_given_back_is_not() -> None:
    seen = iter([{1: 200_000_000}, {1: 160_000_000}, {1: 140_000_000}])
    assert settled(lambda: next(seen), {1: 100_000_000}, LIMIT, 60.0) == []


def test_processes_that_are_replaced_are_noticed() -> None:
    assert grown({1: 5, 2: 5}, {1: 5, 3: 5}, LIMIT) == ["processes ended or began: [1, 2] before, [1, 3] after"]


def test_tracebacks_are_found() -> None:
    frames = "Traceback (most recent call last):\n  File a\n    b()\n"
    log = f"fine\nERROR x failed\n{frames}RuntimeError: no\nfine\nERROR y failed\n{frames}RuntimeError: no\n"
    assert tracebacks(log) == [f"ERROR x failed\n{frames}RuntimeError: no"]
    assert tracebacks("fine\n") == []
