"""Division of a batch among threads.

A run is a part of a batch, cut between sequences, that one thread takes through all layers independently. It consists
of groups: adjacent sequences of equal length.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Group(NamedTuple):
    """Adjacent sequences of equal length, which continue the same prefix."""

    start: int  # the first token
    sequences: int
    length: int  # tokens of each
    keys: int = 0  # number of its first tokens that are attended to; 0: all
    prefix: int = 0  # tokens of another sequence that come before those of each
    prefix_start: int = 0  # the first of these tokens


Ints = npt.NDArray[np.int64]

# Tokens of a run. The upper bound is enough for full speed of the matrix products, and keeps what lies between two of
# them in the last-level cache. Below the lower bound, reading the weights costs more than another thread gains.
MAX_RUN_TOKENS = 256
MIN_RUN_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent sequences of a batch that is sorted by length."""

    sequences: slice
    tokens: slice
    groups: list[Group]  # tokens count from the run's first


def run_count(tokens: int, threads: int) -> int:
    """Number of runs to cut a batch into: a multiple of `threads`, unless runs would be too short."""
    return max(1, min(threads * -(-tokens // (threads * MAX_RUN_TOKENS)), tokens // MIN_RUN_TOKENS))


def cut_into_runs(lengths: Ints, attended: Ints | None, count: int, prefixes: Ints | None = None) -> Iterator[Run]:
    """Cut sequences into at most `count` runs of about equal tokens.

    They are sorted by `lengths` [B], and among equal ones by `attended` [B]: the tokens attended to; None: all. With
    `prefixes` [B, 2], those of the batch in this order, all are one run, in which equal ones are adjacent.
    """
    if not len(lengths):
        return
    if len(lengths) == 1:  # as below, without the arrays
        only = int(lengths[0])
        yield Run(slice(0, 1), slice(0, only), [Group(0, 1, only, 0 if attended is None else int(attended[0]))])
        return
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    # Cut at the ends of sequences that are nearest to even shares of the tokens.
    shares = np.arange(1, count) * total / count
    cuts = np.searchsorted(ends - lengths / 2, shares)
    bounds = np.unique(np.concatenate([[0], cuts, [len(lengths)]])).tolist()
    for first, last in itertools.pairwise(bounds):
        own = lengths[first:last]
        changes = np.diff(own, prepend=0) != 0
        if attended is not None:
            changes |= np.diff(attended[first:last], prepend=0) != 0
        if prefixes is not None:
            changes[1:] |= (np.diff(prefixes, axis=0) != 0).any(1)
        (firsts,) = np.nonzero(changes)
        starts = ends[first:last] - ends[first] + own[0] - own  # of every sequence
        yield Run(
            sequences=slice(first, last),
            tokens=slice(int(ends[first] - lengths[first]), int(ends[last - 1])),
            groups=[
                Group(*group)
                for group in zip(
                    starts[firsts].tolist(),
                    np.diff(firsts, append=len(own)).tolist(),
                    own[firsts].tolist(),
                    [0] * len(firsts) if attended is None else attended[first:last][firsts].tolist(),
                    [0] * len(firsts) if prefixes is None else prefixes[firsts, 1].tolist(),
                    [0] * len(firsts) if prefixes is None else starts[prefixes[firsts, 0]].tolist(),
                    strict=True,
                )
            ],
        )


class _Run(threading.local):
    allowed = 1


_run = _Run()


def allow_threads(count: int) -> None:
    """Set the number of threads of this thread's operators, until the next call."""
    _run.allowed = count


def allowed_threads() -> int:
    """Threads that the operators of this thread may use."""
    return _run.allowed
