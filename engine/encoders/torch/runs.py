"""Cuts a batch, between sequences, into runs that threads take through all layers independently."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embert.engine.encoders.torch.attention import Group
from embert.engine.packing import cumulative

__all__ = ["MAX_RUN_TOKENS", "MIN_RUN_TOKENS", "Run", "cut_into_runs"]

# Tokens of a run. The upper bound is enough for full speed of the matrix products, and keeps what lies between two of
# them in the last-level cache. Below the lower bound, reading the weights costs more than another thread gains.
MAX_RUN_TOKENS = 512
MIN_RUN_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours among sequences sorted by length."""

    sequences: slice
    tokens: slice
    groups: list[Group]  # sequences of equal length; tokens count from the run's first


def cut_into_runs(lengths: npt.NDArray[np.int64], threads: int) -> Iterator[Run]:
    """Cut sorted lengths [B] into runs of about equal tokens, a multiple of `threads` of them where possible."""
    if not len(lengths):
        return
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    count = threads * -(-total // (threads * MAX_RUN_TOKENS))
    count = max(1, min(count, total // MIN_RUN_TOKENS))
    # Cut at the ends of sequences that are nearest to even shares of the tokens.
    shares = np.arange(1, count) * total / count
    cuts = np.searchsorted(ends - lengths / 2, shares)
    bounds = np.unique(np.concatenate([[0], cuts, [len(lengths)]])).tolist()
    for first, last in itertools.pairwise(bounds):
        sizes, counts = np.unique(lengths[first:last], return_counts=True)
        starts = cumulative((sizes * counts).astype(np.int32))[:-1]
        yield Run(
            sequences=slice(first, last),
            tokens=slice(int(ends[first] - lengths[first]), int(ends[last - 1])),
            groups=list(zip(starts.tolist(), counts.tolist(), sizes.tolist(), strict=True)),
        )
