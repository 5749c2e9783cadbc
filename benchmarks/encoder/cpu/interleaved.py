"""Interleaved rounds of rivals, so that a change in the machine's speed affects them alike.

Each has its own process for the whole run. A round in which other processes use CPU time is repeated, a few times.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.rivals.cpu_encoders import Rival, serve

QUIET_CORES = 0.15  # most cores that other processes may use during one measurement
PATIENCE = 4  # at most this many times the rounds asked for
REST_S = 0.05  # before each measurement: the threads of the rival before it spin for a while after their work


@contextmanager
def processes(
    rivals: Mapping[str, type[Rival]], folder: Path, dtype: str, workloads: Mapping[str, Any]
) -> Iterator[dict[str, Connection]]:
    """Start every rival, one after the other; end them with the block."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    started = []
    try:
        for name, rival in rivals.items():
            parent_end, child_end = context.Pipe()
            process = context.Process(target=serve, args=(rival, folder, dtype, workloads, child_end), daemon=True)
            process.start()
            child_end.close()
            started.append(process)
            parent_end.recv()
            pipes[name] = parent_end
        yield pipes
    finally:
        for process in started:
            process.terminate()
            process.join()


def ask(pipe: Connection, workload: str | None) -> Any:
    """Return the response of `serve` to a workload's name, or to None."""
    pipe.send(workload)
    return pipe.recv()


def measure(pipes: dict[str, Connection], workload: str, rounds: int) -> tuple[dict[str, float], bool]:
    """Return medians in ms by encoder, and whether enough rounds were quiet."""
    quiet: list[dict[str, float]] = []
    disturbed: list[dict[str, float]] = []
    _round(pipes, workload)  # a warm-up
    while len(quiet) < rounds and len(quiet) + len(disturbed) < PATIENCE * rounds:
        seconds, others = _round(pipes, workload)
        (quiet if others < QUIET_CORES else disturbed).append(seconds)
    enough = len(quiet) >= 3
    chosen = quiet if enough else quiet + disturbed
    return {name: statistics.median(seconds[name] for seconds in chosen) * 1e3 for name in pipes}, enough


def _round(pipes: dict[str, Connection], workload: str) -> tuple[dict[str, float], float]:
    """Return seconds by encoder, and the cores that other processes used during the worst measurement."""
    seconds, others = {}, 0.0
    for name, pipe in pipes.items():
        time.sleep(REST_S)
        start, busy = time.perf_counter(), _busy_s()
        seconds[name], cpu = ask(pipe, workload)
        others = max(others, (_busy_s() - busy - cpu) / (time.perf_counter() - start))
    return seconds, others


def _busy_s() -> float:
    """Return the CPU seconds of all processes since the machine started."""
    user, nice, system, _idle, _waiting, *interrupts = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:8]
    )
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
