"""A part of the cores for what is measured."""

from __future__ import annotations

import os

__all__ = ["embed_on"]


def embed_on(cores: int) -> None:
    """Keep this process, and what it starts from now on, on the first so many of its cores; 0: on all."""
    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
