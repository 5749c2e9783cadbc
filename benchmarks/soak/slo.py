"""A service-level objective and whether it was met: one row of the tables of benchmarks.soak."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Objective"]


@dataclass(frozen=True, slots=True)
class Objective:
    """One measured figure; `promised` is empty where it has no objective."""

    what: str
    measured: str
    promised: str = ""
    kept: bool = True
