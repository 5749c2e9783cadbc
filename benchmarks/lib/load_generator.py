"""An HTTP/1.1 load generator that is cheap enough not to be the limit: prebuilt bytes on raw sockets, in processes.

Closed loop: each connection sends its next request when the last one has ended. Open loop: requests are due at
Poisson arrivals or at even intervals, whatever the server does. A latency counts from the moment the request was *due*,
so a server that stalls cannot slow the load down and hide it (coordinated omission).

The generator reports its own CPU (`client_cores`, `busiest_client`) and its own lateness (`late_s`). Where these are
high, the generator was the limit.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from types import TracebackType

import numpy as np

from benchmarks.lib import load_worker
from benchmarks.lib.load_plan import Plan, Responses


class LoadGenerator:
    """Processes that send. They live from run to run, because starting one takes longer than a short run."""

    def __init__(self, processes: int = 1) -> None:
        self._processes = processes
        self._pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
        list(self._pool.map(_warm, range(processes)))

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def run(self, plan: Plan, at_window: Callable[[], None] | None = None) -> Responses:
        """Run `plan` over all processes; call `at_window` when the measured window opens and when it closes."""
        first = time.monotonic() + 0.2
        share = min(self._processes, plan.connections)
        parts = [
            self._pool.submit(
                load_worker.run,
                replace(
                    plan,
                    connections=len(range(i, plan.connections, share)),
                    rate=plan.rate / share if plan.rate else None,
                    seed=plan.seed + i,
                    phase=i / share,
                ),
                first,
            )
            for i in range(share)
        ]
        for moment in (first + plan.settle_s, first + plan.settle_s + plan.window_s):
            time.sleep(max(0.0, moment - time.monotonic()))
            if at_window is not None:
                at_window()
        responses = [part.result() for part in parts]
        return Responses(
            request=np.concatenate([a.request for a in responses]),
            status=np.concatenate([a.status for a in responses]),
            due=np.concatenate([a.due for a in responses]),
            ended=np.concatenate([a.ended for a in responses]),
            late_s=np.concatenate([a.late_s for a in responses]),
            opened=first + plan.settle_s,
            client_cores=sum(a.client_cores for a in responses),
            busiest_client=max(a.busiest_client for a in responses),
        )


def _warm(_: int) -> None:
    time.sleep(0.05)  # long enough that each process of the pool gets one call
