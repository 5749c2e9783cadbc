"""Times of calls on the GPU, in bursts after a rest or under sustained load.

A GPU at its power limit lowers its clock within milliseconds, by as much as a third. So a burst is a rest, a hundredth
of a second to wake up and a twentieth that is timed, each at least one batch. Sustained times follow a second of load.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

REST_S = 0.3  # before a burst
WAKE_UP_MS = 10.0  # of a burst, before it is timed
BURST_MS = 50.0
SUSTAINED_S = 1.0  # of load, before it is timed for as long again


def calls_in(lasts_ms: float, each_ms: float) -> int:
    """Return how many calls of `each_ms` fill `lasts_ms`; at least one."""
    return max(1, round(lasts_ms / each_ms))


def device_burst(run: Callable[[], object]) -> float:
    """Return milliseconds a call, in a burst."""
    each = device_ms(run, 4)
    time.sleep(REST_S)
    device_ms(run, calls_in(WAKE_UP_MS, each))
    return device_ms(run, calls_in(BURST_MS, each))


def device_sustained(run: Callable[[], object]) -> float:
    """Return milliseconds a call, under sustained load."""
    until = time.perf_counter() + SUSTAINED_S
    while time.perf_counter() < until:
        each = device_ms(run, 20)
    return device_ms(run, max(20, int(SUSTAINED_S * 1e3 / each)))


def device_ms(run: Callable[[], object], times: int) -> float:
    """Return milliseconds a call on the device, by events around `times` calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / times


def gemm_peak() -> float:
    """Return the TFLOP/s of torch's own 8192³ product of random FP16 matrices."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
    device_ms(lambda: a @ b, 3)
    time.sleep(REST_S)
    return 2 * 8192**3 / device_ms(lambda: a @ b, 20) * 1e-9
