"""Sequences of equal length that lie side by side in a run."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Group"]


class Group(NamedTuple):
    """Neighbors among sequences, which are of equal length."""

    start: int  # the first token
    sequences: int
    length: int  # tokens of each
    keys: int = 0  # its first tokens are attended to, so many of them; 0: all
