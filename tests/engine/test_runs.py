"""Division of a batch among threads."""

from __future__ import annotations

import numpy as np
import pytest

from embert.engine.encoders.cpu.runs import MAX_RUN_TOKENS, PRODUCTS_COST, assign_runs

HIDDEN_SIZE = 384


def _end(lengths: list[int], threads: int) -> float:
    """Time at which the last thread ends, over the average; 1 if all threads share each kernel."""
    sizes = np.array(lengths)
    runs = assign_runs(sizes, threads, HIDDEN_SIZE, shares_kernels=True)
    if runs is None:
        return 1.0
    costs = sizes * (PRODUCTS_COST * HIDDEN_SIZE + sizes)
    ends = [0.0] * threads
    for run in range(int(runs.max()) + 1):
        assert (runs == run).any()
        ends[ends.index(min(ends))] += float(costs[runs == run].sum())
    return max(ends) / (sum(ends) / threads)


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("shortest", [8, 128])
@pytest.mark.parametrize("count", [2, 3, 15, 31, 100])
def test_no_thread_has_much_more_to_do(threads: int, shortest: int, count: int) -> None:
    lengths = np.random.default_rng(count).integers(shortest, 129, count).tolist()
    assert _end(lengths, threads) < 1 + 0.03 * threads


@pytest.mark.parametrize("count", [40, 200])
def test_runs_are_about_as_long_as_they_may_be(count: int) -> None:
    lengths = np.random.default_rng(1).integers(8, 65, count)
    runs = assign_runs(lengths, 2, HIDDEN_SIZE, shares_kernels=True)
    assert runs is not None
    tokens = np.bincount(runs, lengths)
    assert tokens.max() < 1.25 * MAX_RUN_TOKENS
    assert tokens.mean() > 0.5 * MAX_RUN_TOKENS


@pytest.mark.parametrize("lengths", [[], [300], [20, 20], [500, 40], [128, 128, 128]])
def test_threads_share_kernels_where_they_could_not_be_balanced(lengths: list[int]) -> None:
    assert assign_runs(np.array(lengths, np.int64), 2, HIDDEN_SIZE, shares_kernels=True) is None


def test_many_threads_share_kernels() -> None:
    lengths = np.full(160, 100, np.int64)
    assert assign_runs(lengths, 8, HIDDEN_SIZE, shares_kernels=True) is None
    assert assign_runs(lengths, 8, HIDDEN_SIZE, shares_kernels=False) is not None
