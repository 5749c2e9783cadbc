"""A timer that rings to the microsecond inside an event loop, whose own timers round to the millisecond."""

from __future__ import annotations

import ctypes
import os

__all__ = ["Timer"]


class Timer:
    """Linux's timerfd, which Python has only since 3.13."""

    CLOCK_MONOTONIC = 1
    TFD_TIMER_ABSTIME = 1

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.timerfd_create(self.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def set(self, moment: float) -> None:
        """Ring at `moment`, seconds on CLOCK_MONOTONIC; a moment that has passed rings at once."""
        seconds, fraction = divmod(moment, 1.0)
        value = (ctypes.c_long * 4)(0, 0, int(seconds), int(fraction * 1e9))  # interval, then the moment
        self._libc.timerfd_settime(self.fd, self.TFD_TIMER_ABSTIME, ctypes.byref(value), None)

    def read(self) -> None:
        """Take note of a ring; without it the descriptor stays readable."""
        os.read(self.fd, 8)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.fd)
