"""What the scheduler costs a batch, by the number of requests that wait: microseconds, the least of several runs.

    python -m benchmarks.server.batch_forming [--tokens 16384]

Requests of 32 passages, or of one short text, or both. The queue is filled again after each batch, as by clients that
ask again, which is timed apart. Needs no encoder.
"""

from __future__ import annotations

import argparse
import time
from itertools import count

from embert.server.engine_worker.scheduling import Batch, BatchLimits, Request, Scheduler, ThroughputEstimate

WAITING = (10, 100, 1_000, 10_000)
BATCHES, RUNS = 30, 5
PASSAGES = [60, 80, 100, 120, 140] * 6 + [90, 110]  # 3 200 tokens
KINDS = {"32 passages": [PASSAGES], "a text of 16 tokens": [[16]], "half of each": [PASSAGES, [16]]}


def measure_us(tokens: int, waiting: int, kinds: list[list[int]]) -> tuple[float, float, float]:
    """Return microseconds for a batch and for a request that is added, and the slices of a batch."""
    scheduler, keys = Scheduler(), count()
    cost = ThroughputEstimate(tokens)
    cost.calibrate(1e-4, 1e-7)
    scheduler.add_model(None, BatchLimits.of(cost, tokens))

    def add(requests: int) -> None:
        for _ in range(requests):
            number = next(keys)
            scheduler.add(Request(number, kinds[number % len(kinds)], deadline=1e9 + number))

    add(waiting)
    forming_s, adding_s, added, slices = 0.0, 0.0, 0, 0
    for _ in range(BATCHES):
        began = time.perf_counter()
        batch: Batch | None = scheduler.next_batch()
        formed = time.perf_counter()
        assert batch is not None
        done = sum(piece.stop == piece.request.texts for piece in batch.slices)
        refilled = time.perf_counter()
        add(done)
        adding_s += time.perf_counter() - refilled
        forming_s += formed - began
        slices += len(batch.slices)
        added += done
    return forming_s / BATCHES * 1e6, adding_s / max(1, added) * 1e6, slices / BATCHES


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.server.batch_forming", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=16384, help="of a batch")
    tokens = parser.parse_args().tokens
    print("| requests | waiting | µs a batch | slices a batch | µs to add a request |\n|---|--:|--:|--:|--:|")
    for name, kinds in KINDS.items():
        for waiting in WAITING:
            runs = [measure_us(tokens, waiting, kinds) for _ in range(RUNS)]
            forming, adding = min(each[0] for each in runs), min(each[1] for each in runs)
            print(f"| {name} | {waiting} | {forming:.0f} | {runs[0][2]:.0f} | {adding:.1f} |")


if __name__ == "__main__":
    main()
