"""Forks the workers of a run from a process that has imported their modules, because imports take seconds."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["embert.server.bulk.stages", "tests.server.bulk.forks", "tests.server.stand_in"])


def fork(*, target: Callable[..., None], args: Any, name: str, daemon: bool) -> Any:
    """Stands in for the class Process."""
    return _FORKS.Process(target=_run, args=(dict(os.environ), target, args), name=name, daemon=daemon)


def _run(environment: dict[str, str], target: Callable[..., None], args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
