"""Division of a batch among threads.

A run is a part of a batch, cut between sequences, that one thread takes through all layers independently. It consists
of groups: adjacent sequences of equal length.
"""

from __future__ import annotations

import heapq
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

# From this number of threads on, all share each kernel, where they can: each weight is then read once, and not by each
# thread. Shared over in runs, the time of 24 texts of 128 tokens on a Xeon with AVX-512: with 4 threads 0.97, with 8
# 0.83, with 16 0.74.
SHARING_THREADS = 8

# With fewer threads they share each kernel only if one would have this much more to do than the average, for each
# thread.
MAX_EXCESS = 0.03

# Among more sequences than this the first assignment is balanced enough, and comparing each two would take longer.
MAX_EXCHANGED = 256

# The products of a token cost as much as attention to this many tokens, times the hidden size: six by their arithmetic,
# and attention runs at two thirds of the speed.
PRODUCTS_COST = 4


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent sequences of a batch that is sorted by run, and then by length."""

    sequences: slice
    tokens: slice
    groups: list[Group]  # tokens count from the run's first


def assign_runs(lengths: Ints, threads: int, hidden_size: int, *, shares_kernels: bool) -> Ints | None:
    """Assign sequences to runs so that all threads end at about the same time.

    Returns the run of each sequence [B], numbered in the order in which threads take them. None: all are one run. That
    is so if there are too few tokens for two, and, with `shares_kernels`, if there are many threads or one would have
    much more to do than others.
    """
    tokens = int(lengths.sum())
    workers = min(threads, tokens // MIN_RUN_TOKENS, len(lengths))
    if workers < 2 or (shares_kernels and (workers < threads or threads >= SHARING_THREADS)):
        return None
    costs = lengths * (PRODUCTS_COST * hidden_size + lengths)
    worker_of = _balance(costs, workers)
    loads = np.bincount(worker_of, costs, workers)
    average = float(loads.mean())
    if shares_kernels and loads.max() > average * (1 + MAX_EXCESS * threads):
        return None
    # Each thread takes its longest sequences first, in as many runs as keep to the limit on average.
    runs_each = -(-tokens // (workers * MAX_RUN_TOKENS))
    order = np.lexsort((-costs, worker_of))
    before = (np.cumsum(costs[order]) - costs[order]) - (np.cumsum(loads) - loads)[worker_of[order]]
    part = np.minimum((before + costs[order] / 2) * runs_each // average, runs_each - 1)
    _, firsts, numbers = np.unique(worker_of[order] * runs_each + part, return_index=True, return_inverse=True)
    runs = np.empty(len(lengths), np.int64)
    runs[order] = np.argsort(np.argsort(before[firsts], kind="stable"))[numbers]
    return runs


def _balance(costs: Ints, workers: int) -> Ints:
    """Assign sequences [B] to workers so that the sums of their costs are about equal."""
    worker_of = np.empty(len(costs), np.int64)
    loads = [(0, worker) for worker in range(workers)]
    for sequence in np.argsort(-costs, kind="stable").tolist():  # to the worker that has least
        load, worker = loads[0]
        worker_of[sequence] = worker
        heapq.heapreplace(loads, (load + int(costs[sequence]), worker))
    if len(costs) > MAX_EXCHANGED:
        return worker_of
    for _ in range(workers):  # exchange two sequences of the ones that have least and most
        (least, lightest), (most, heaviest) = min(loads), max(loads)
        light, heavy = (np.flatnonzero(worker_of == worker) for worker in (lightest, heaviest))
        differences = costs[heavy] - costs[light][:, None]
        best = np.unravel_index(np.abs(2 * differences - (most - least)).argmin(), differences.shape)
        shift = int(differences[best])
        if not 0 < shift < most - least:
            break
        worker_of[light[best[0]]], worker_of[heavy[best[1]]] = heaviest, lightest
        loads.remove((least, lightest))
        loads.remove((most, heaviest))
        loads += [(least + shift, lightest), (most - shift, heaviest)]
    return worker_of


def cut_into_runs(
    lengths: Ints, attended: Ints | None, runs: Ints | None, prefixes: Ints | None = None
) -> Iterator[Run]:
    """Yield the runs of sequences that are sorted by `runs` [B], numbers from 0 on; None: all are one run.

    Those of a run are sorted by `lengths` [B], and among equal ones by `attended` [B], the tokens attended to; None:
    all. With `prefixes` [B, 2], those of the batch in this order, all are one run, in which equal ones are adjacent.
    """
    if not len(lengths):
        return
    if len(lengths) == 1:  # as below, without the arrays
        only = int(lengths[0])
        yield Run(slice(0, 1), slice(0, only), [Group(0, 1, only, 0 if attended is None else int(attended[0]))])
        return
    ends = np.cumsum(lengths)
    bounds = [0, len(lengths)] if runs is None else np.searchsorted(runs, np.arange(runs[-1] + 2)).tolist()
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
