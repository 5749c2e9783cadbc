"""Attention on packed sequences: batched products over sequences of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from embert.engine.encoders.torch.relative_positions import RelativePositions

__all__ = ["LENGTH_STEP", "SHORT_LENGTH", "Group", "attention"]


class Group(NamedTuple):
    """Neighbours among sequences, which are of equal length."""

    start: int  # the first token
    sequences: int
    length: int  # tokens of each
    keys: int = 0  # its first tokens are attended to, so many of them; 0: all


# Attention scores held at once. More are computed in turn, so that they stay in the cores' own caches.
MAX_SCORE_BYTES = 2 << 20

# In bfloat16, sequences of more tokens than SHORT_LENGTH are padded to a multiple of LENGTH_STEP.
SHORT_LENGTH, LENGTH_STEP = 64, 16


def attention(
    qkv: torch.Tensor, groups: Sequence[Group], heads: int, relative: RelativePositions | None = None
) -> torch.Tensor:
    """[T, 3 · hidden] → [T, hidden]. Queries are scaled already. Rows after the last group become 0.

    Batched products and a softmax: at BERT's lengths torch's scaled_dot_product_attention takes up to 2.5 times as long
    on a CPU (float32; equal at 512 tokens a sequence).

    A bfloat16 product has one kernel for each shape, which takes milliseconds to make and 0.7 MB to keep. So short
    sequences are multiplied in float32, which is no slower for them. Longer ones are multiplied one at a time, with
    rows of zeros up to a multiple of LENGTH_STEP; the scores of these rows are masked.
    """
    tokens, hidden = qkv.shape[0], qkv.shape[1] // 3
    size = hidden // heads
    context = qkv.new_empty(tokens, hidden)
    stop = 0
    for start, n, length, keys in groups:
        stop = start + n * length
        given = qkv[start:stop].view(n, length, 3, heads, size).permute(2, 0, 3, 1, 4)
        padded = qkv.dtype != torch.float32 and length > SHORT_LENGTH
        rows = -(-length // LENGTH_STEP) * LENGTH_STEP if padded else length
        split = torch.empty(3, n, heads, rows, size, dtype=qkv.dtype if padded else torch.float32)
        split[:, :, :, :length] = given
        split[:, :, :, length:] = 0
        q, k, v = split.view(3, n * heads, rows, size)
        at_once = max(1, MAX_SCORE_BYTES // (rows * rows * split.element_size()))
        if padded or relative is not None:
            # Either some heads of one sequence, or all heads of some sequences.
            sequences = 1 if padded else max(1, at_once // heads)
            at_once = max(part for part in range(1, heads + 1) if heads % part == 0 and part <= at_once) * sequences
        mixed = torch.empty_like(q)
        for first in range(0, n * heads, at_once):
            part = slice(first, first + at_once)
            bias = None
            if relative is not None:
                bias = relative.bias(rows, q.dtype)[first % heads :][:at_once]
            torch.bmm(_weights(q[part], k[part], keys or length, bias), v[part], out=mixed[part])
        mixed = mixed.view(n, heads, rows, size)[:, :, :length]
        context[start:stop].view(n, length, heads, size).copy_(mixed.transpose(1, 2))
    context[stop:] = 0
    return context


def _weights(q: torch.Tensor, k: torch.Tensor, keys: int, bias: torch.Tensor | None) -> torch.Tensor:
    """softmax(q·kᵀ + bias) over the first `keys` keys: [n · heads, rows, rows]. `bias` is [some heads, rows, rows]."""
    scores = torch.bmm(q, k.transpose(1, 2))
    if bias is not None:
        scores.view(-1, *bias.shape).add_(bias)
    scores[:, :, keys:] = -torch.inf
    return scores.softmax(-1)
