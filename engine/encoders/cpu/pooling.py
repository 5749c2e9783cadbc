"""Pooling of packed hidden states by groups of sequences of equal length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from embert.engine.batch import cumulative
from embert.engine.encoders.cpu import kernels
from embert.engine.encoders.cpu.runs import Group
from embert.engine.heads.pooled_rows import pooled_rows
from embert.engine.heads.pooling import POOLINGS

__all__ = ["ONE_ROW", "one_row_each", "pooled"]

# Poolings that take one row of each sequence: the last layer then computes only these rows after its attention.
ONE_ROW = ("cls", "last-token")


def one_row_each(groups: Sequence[Group], pooling: str) -> torch.Tensor:
    """The rows that a pooling of ONE_ROW takes, one a sequence: int64 [n]."""
    rows = [
        torch.arange(n) * length + start + (0 if pooling == "cls" else length - 1) for start, n, length, _ in groups
    ]
    return torch.cat(rows)


def pooled(
    hidden: torch.Tensor,
    groups: Sequence[Group],
    pooling: str,
    *,
    own_kernels: bool = False,
    prompt_tokens: npt.NDArray[np.integer] | None = None,
) -> torch.Tensor:
    """[T, hidden] → float32 [n, hidden · modes] for the groups' n sequences, by `Model.pooling`.

    `own_kernels` take float32. `prompt_tokens` [n] are not pooled.
    """
    if pooling not in POOLINGS or prompt_tokens is not None:
        counts = [group.sequences for group in groups]
        lengths = np.repeat(np.array([group.length for group in groups], np.int32), counts)
        return torch.from_numpy(pooled_rows(hidden.float().numpy(), cumulative(lengths), pooling, prompt_tokens))
    if pooling in ONE_ROW:
        return hidden[one_row_each(groups, pooling)].float()
    if own_kernels and pooling == "mean":
        return kernels.means(hidden, groups)
    rows = [_pooled(hidden, group, pooling) for group in groups]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _pooled(hidden: torch.Tensor, group: Group, pooling: str) -> torch.Tensor:
    start, n, length, _ = group
    rows = hidden[start : start + n * length].view(n, length, -1)
    return rows.mean(1, dtype=torch.float32) if pooling == "mean" else rows.amax(1).float()
