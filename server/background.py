"""Tasks that run as long as an API process does: one that ends by a mistake ends the process, which is started again.

Without its sweeps, a process would look alive and miss deadlines, keys or the supervisor's word for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from server.logs import leave

__all__ = ["keep_running", "or_leave"]

log = logging.getLogger(__name__)

P = ParamSpec("P")


def keep_running(
    coroutine: Coroutine[Any, Any, Any], *, may_end: bool = False, end: Callable[[int], Any] = leave
) -> asyncio.Task[None]:
    """A task that only `cancel` may end, or with `may_end` success. Else the reason is logged and `end(70)` called."""
    return asyncio.create_task(_watched(coroutine, may_end, end))


async def _watched(coroutine: Coroutine[Any, Any, Any], may_end: bool, end: Callable[[int], Any]) -> None:
    name = getattr(coroutine, "__qualname__", "a task")
    try:
        await coroutine
    except Exception:
        log.critical("a mistake of ours in %s, this process ends", name, exc_info=True)
        end(70)
    else:
        if not may_end:
            log.critical("a mistake of ours: %s has ended, and so does this process", name)
            end(70)


def or_leave(callback: Callable[P, None], end: Callable[[int], Any] = leave) -> Callable[P, None]:
    """The same for what the event loop calls, which would log an exception and go on."""

    def watched(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception:
            name = getattr(callback, "__qualname__", "a callback")
            log.critical("a mistake of ours in %s, this process ends", name, exc_info=True)
            end(70)

    return watched
