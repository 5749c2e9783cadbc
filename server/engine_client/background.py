"""Tasks that run as long as an HTTP process. One that fails ends the process, and the supervisor restarts it.

Without these tasks, a process would look alive and miss deadlines, keys or the supervisor's messages for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ParamSpec

from embert.server.observability.logs import exit_now

log = logging.getLogger(__name__)

P = ParamSpec("P")


def keep_running(coroutine: Coroutine[Any, Any, None], *, may_end: bool = False) -> asyncio.Task[None]:
    """Starts a task that only `cancel`, or with `may_end` success, may end. Others are logged and end the process."""
    task = asyncio.create_task(coroutine)
    task.add_done_callback(partial(_on_done, may_end=may_end))
    return task


def _on_done(task: asyncio.Task[None], *, may_end: bool) -> None:
    if task.cancelled():
        return
    name = getattr(task.get_coro(), "__qualname__", "a task")
    error = task.exception()
    if error is not None:
        log.critical("internal error in %s, this process ends", name, exc_info=error)
        exit_now(70)
    elif not may_end:
        log.critical("internal error: %s has ended, and so does this process", name)
        exit_now(70)


def exit_on_error(callback: Callable[P, None]) -> Callable[P, None]:
    """Wraps a callback of the event loop, which would log an exception and go on."""

    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception:  # a bug: the loop would log it and go on without the callback
            name = getattr(callback, "__qualname__", "a callback")
            log.critical("internal error in %s, this process ends", name, exc_info=True)
            exit_now(70)

    return wrapper
