"""Attention of layers whose tokens see only near ones: blocks of queries, each with the keys in its reach."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

__all__ = ["is_banded", "outside", "windowed"]

BLOCK = 64  # queries that share their keys
MAX_SCORE_BYTES = 2 << 20  # held at once, as in packed.py


def is_banded(window: int | None, length: int) -> bool:
    """Whether blocks read fewer keys than all queries together would."""
    return window is not None and length > 2 * (BLOCK + window)


def outside(length: int, window: int) -> torch.Tensor:
    """Which keys each query does not see: bool [length, length]."""
    positions = torch.arange(length)
    return (positions - positions[:, None]).abs() > window


def windowed(split: torch.Tensor, window: int, keys: int) -> torch.Tensor:
    """Attention of each query to the keys at most `window` tokens away, of the first `keys`.

    Queries, keys and values are float32 [3, N, L, size]; returns [N, L, size].

    Block b of queries has the keys b · BLOCK - window … (b + 1) · BLOCK + window - 1. A query that sees no key gets 0.
    """
    _, count, length, size = split.shape
    blocks, span = -(-length // BLOCK), BLOCK + 2 * window
    spare = blocks * BLOCK - length
    q = F.pad(split[0], (0, 0, 0, spare))
    k, v = (F.pad(each, (0, 0, window, spare + window)) for each in split[1:])
    distances = torch.arange(span) - window - torch.arange(BLOCK)[:, None]
    unseen = torch.zeros(BLOCK, span).masked_fill_(distances.abs() > window, -torch.inf)
    at_once = max(1, MAX_SCORE_BYTES // (BLOCK * span * 4))
    mixed = torch.empty_like(q)
    for head in range(count):
        for first in range(0, blocks, at_once):
            some = min(at_once, blocks - first)
            rows = slice(first * BLOCK, (first + some) * BLOCK)
            shape, strides, offset = (some, span, size), (BLOCK * size, size, 1), first * BLOCK * size
            near_k, near_v = (
                each[head].as_strided(shape, strides, each[head].storage_offset() + offset) for each in (k, v)
            )
            scores = torch.baddbmm(unseen, q[head, rows].view(some, BLOCK, size), near_k.transpose(1, 2))
            _mask_ends(scores, first, window, keys)
            weights = scores.softmax(-1)
            if keys < length:
                weights.nan_to_num_(0.0)
            torch.bmm(weights, near_v, out=mixed[head, rows].view(some, BLOCK, size))
    return mixed[:, :length].contiguous()


def _mask_ends(scores: torch.Tensor, first: int, window: int, keys: int) -> None:
    """Mask what lies before the first key and after the last in blocks from `first` on: [blocks, BLOCK, span]."""
    for index in range(len(scores)):
        start = (first + index) * BLOCK - window  # the key of column 0
        if start < 0:
            scores[index, :, :-start] = -torch.inf
        if start + scores.shape[2] > keys:
            scores[index, :, max(0, keys - start) :] = -torch.inf
