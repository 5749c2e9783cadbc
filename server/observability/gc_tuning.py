"""Python's garbage collector in a process that answers requests.

A collection stops the process. One over all that the imports left takes 20 ms in an HTTP process and 7 ms in an engine;
over 50 000 new objects, 10 ms. At 10 000 requests a second such a stall holds up a hundred of them.
"""

from __future__ import annotations

import gc

__all__ = ["begin", "settle"]


def begin() -> None:
    """Before the imports: what they make is there to stay, so do not look at it every 700 objects."""
    gc.set_threshold(50_000, 20, 100)


def settle() -> None:
    """Ready: what there is now stays and need not be looked at again; what comes is looked at in small portions.

    A request makes no cycles, and so hardly anything is ever found; 5 000 objects take a millisecond.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 100)
