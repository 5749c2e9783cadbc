"""Linux's timerfd: microsecond timers for an event loop whose own timers round to the millisecond."""

from __future__ import annotations

import ctypes
import os

__all__ = ["Timer"]


class Timer:
    """One timer on CLOCK_MONOTONIC. Python has timerfd in `os` since 3.13 only."""

    CLOCK_MONOTONIC = 1
    TFD_TIMER_ABSTIME = 1

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.timerfd_create(self.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def set(self, moment: float) -> None:
        """Expire at `moment`, seconds on CLOCK_MONOTONIC; at once if that has passed."""
        seconds, fraction = divmod(moment, 1.0)
        value = (ctypes.c_long * 4)(0, 0, int(seconds), int(fraction * 1e9))  # interval, then expiry
        self._libc.timerfd_settime(self.fd, self.TFD_TIMER_ABSTIME, ctypes.byref(value), None)

    def read(self) -> None:
        """Acknowledge an expiry; until then the descriptor stays readable."""
        os.read(self.fd, 8)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)
