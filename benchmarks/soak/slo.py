"""A promise and what became of it: a line of the tables of benchmarks.soak."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Line"]


@dataclass(frozen=True, slots=True)
class Line:
    """Nothing is promised where `promised` is empty."""

    what: str
    measured: str
    promised: str = ""
    kept: bool = True
