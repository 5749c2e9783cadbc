"""Handlers for the signals to `embert serve`: some end it, SIGHUP reloads, and the others do nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import cache
from types import FrameType

DRAIN_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
# By default they end the process. Children inherit that they are ignored.
_IGNORED = (signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO, signal.SIGPWR)


def handle_signals(end: Callable[[int], object], reload: Callable[[], object]) -> None:
    """Set handlers: `end` gets the number of a signal that ends the server, `reload` runs on SIGHUP.

    SIGHUP ends a server whose terminal has been closed, unless nohup started it.
    """
    follows_terminal = _follows_terminal()

    def on_end(number: int, frame: FrameType | None) -> None:
        del frame
        end(number)

    def on_hangup(number: int, frame: FrameType | None) -> None:
        del frame
        if follows_terminal and not _has_terminal():
            end(number)
        else:
            reload()

    for number in DRAIN_SIGNALS:
        signal.signal(number, on_end)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, on_hangup)


@cache
def _follows_terminal() -> bool:
    """True if the process ends with its terminal. The first call precedes the first handler."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_DFL and _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True
