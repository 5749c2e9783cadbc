"""Pooling of packed hidden states by groups of sequences of equal length."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from embert.engine.encoders.torch import avx512
from embert.engine.encoders.torch.groups import Group

__all__ = ["ONE_ROW", "pooled", "pooled_rows"]

# Poolings that take one row of each sequence: the last layer then computes only these rows after its attention.
ONE_ROW = ("cls", "last-token")


def pooled_rows(groups: Sequence[Group], pooling: str) -> torch.Tensor:
    """The rows that a pooling of ONE_ROW takes, one a sequence: int64 [n]."""
    rows = [
        torch.arange(n) * length + start + (0 if pooling == "cls" else length - 1) for start, n, length, _ in groups
    ]
    return torch.cat(rows)


def pooled(hidden: torch.Tensor, groups: Sequence[Group], pooling: str, *, own_kernels: bool = False) -> torch.Tensor:
    """[T, hidden] → float32 [n, hidden] for the groups' n sequences. `own_kernels` take float32."""
    if pooling in ONE_ROW:
        return hidden[pooled_rows(groups, pooling)].float()
    if own_kernels and pooling == "mean":
        return avx512.means(hidden, groups)
    rows = [_pooled(hidden, group, pooling) for group in groups]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _pooled(hidden: torch.Tensor, group: Group, pooling: str) -> torch.Tensor:
    start, n, length, _ = group
    rows = hidden[start : start + n * length].view(n, length, -1)
    return rows.mean(1, dtype=torch.float32) if pooling == "mean" else rows.amax(1).float()
