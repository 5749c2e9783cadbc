"""Load over HTTP/1.1 that is not the limit itself: prebuilt bytes on raw sockets, from processes of their own.

Closed loop: each connection sends its next request when the last is answered. Open loop: requests are due at Poisson
arrivals, or at even distances, whatever the server does, and a latency runs from the moment the request was *due*, so
that a stalled server cannot slow its own judge.

The load reports what it cost (`client_cores`, `busiest_client`) and how late it was itself (`late_s`): where those are
high, it was the limit.
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
from benchmarks.lib.load_worker import Answers, Plan

__all__ = ["Load"]


class Load:
    """Processes that send; kept between runs, because starting one takes longer than a short run."""

    def __init__(self, processes: int = 1) -> None:
        self._processes = processes
        self._pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
        list(self._pool.map(_warm, range(processes)))

    def __enter__(self) -> Load:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def run(self, plan: Plan, at_window: Callable[[], None] | None = None) -> Answers:
        """Run `plan`, spread over the processes, and call `at_window` when the window opens and when it closes."""
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
        answers = [part.result() for part in parts]
        return Answers(
            request=np.concatenate([a.request for a in answers]),
            status=np.concatenate([a.status for a in answers]),
            due=np.concatenate([a.due for a in answers]),
            answered=np.concatenate([a.answered for a in answers]),
            late_s=np.concatenate([a.late_s for a in answers]),
            opened=first + plan.settle_s,
            client_cores=sum(a.client_cores for a in answers),
            busiest_client=max(a.busiest_client for a in answers),
        )


def _warm(_: int) -> None:
    time.sleep(0.05)  # long enough that every process of the pool is asked once
