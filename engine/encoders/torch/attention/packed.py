"""Attention on packed sequences: batched products over sequences of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from embert.engine.encoders.torch.attention.distance_bias import DistanceBias
from embert.engine.encoders.torch.attention.rotation import Rotation, rotate
from embert.engine.encoders.torch.attention.window import is_banded, outside, windowed

__all__ = ["LENGTH_STEP", "LONG_LENGTH", "PLAIN", "SHORT_LENGTH", "Group", "Positions", "attention"]


class Group(NamedTuple):
    """Neighbours among sequences, which are of equal length."""

    start: int  # the first token
    sequences: int
    length: int  # tokens of each
    keys: int = 0  # its first tokens are attended to, so many of them; 0: all


@dataclass(frozen=True, slots=True)
class Positions:
    """How layers know positions, and how far they see."""

    rotation: Rotation | None = None
    bias: DistanceBias | None = None
    window: int | None = None  # as Attention.window


PLAIN = Positions()

# Attention scores held at once. More are computed in turn, so that they stay in the cores' own caches.
MAX_SCORE_BYTES = 2 << 20

# In bfloat16, sequences of more tokens than SHORT_LENGTH are padded to a multiple of LENGTH_STEP.
SHORT_LENGTH, LENGTH_STEP = 64, 16

# Sequences of more tokens take torch's own attention, which never holds all scores of a head.
LONG_LENGTH = 1024
BIASED_ROWS = 256  # queries whose biases are held at once there


def attention(qkv: torch.Tensor, groups: Sequence[Group], heads: int, positions: Positions = PLAIN) -> torch.Tensor:
    """[T, 3 · hidden] → [T, hidden]. Queries are scaled already. Rows after the last group become 0.

    Batched products and a softmax: at BERT's lengths torch's scaled_dot_product_attention takes up to 2.5 times as long
    on a CPU (float32; equal at 512 tokens a sequence).

    A bfloat16 product has one kernel for each shape, which takes milliseconds to make and 0.7 MB to keep. So short
    sequences are multiplied in float32, which is no slower for them, and so are windows. Longer ones are multiplied one
    at a time, with rows of zeros up to a multiple of LENGTH_STEP; the scores of these rows are masked.
    """
    tokens, hidden = qkv.shape[0], qkv.shape[1] // 3
    size = hidden // heads
    context = qkv.new_empty(tokens, hidden)
    stop = 0
    for start, n, length, keys in groups:
        stop = start + n * length
        given = qkv[start:stop].view(n, length, 3, heads, size).permute(2, 0, 3, 1, 4)
        banded = is_banded(positions.window, length)
        exact = qkv.dtype == torch.float32 or length <= SHORT_LENGTH or banded
        padded = not exact and length <= LONG_LENGTH
        rows = -(-length // LENGTH_STEP) * LENGTH_STEP if padded else length
        split = torch.empty(3, n, heads, rows, size, dtype=torch.float32 if exact else qkv.dtype)
        _fill(split, given, positions.rotation)
        if banded and positions.window is not None:
            mixed = windowed(split.view(3, n * heads, length, size), positions.window, keys or length)
        elif length > LONG_LENGTH:
            mixed = _long(split, keys or length, positions.bias)
        else:
            mixed = _short(split, keys or length, length, positions, one_by_one=padded)
        mixed = mixed.view(n, heads, rows, size)[:, :, :length]
        context[start:stop].view(n, length, heads, size).copy_(mixed.transpose(1, 2))
    context[stop:] = 0
    return context


def _fill(split: torch.Tensor, given: torch.Tensor, rotation: Rotation | None) -> None:
    """Copy queries, keys and values, the first two of them turned. Rows past the length become 0."""
    length = given.shape[3]
    if rotation is None:
        split[:, :, :, :length] = given
    else:
        rotate(split[:2, :, :, :length], given[:2], *rotation(length))
        split[2, :, :, :length] = given[2]
    split[:, :, :, length:] = 0


def _short(split: torch.Tensor, keys: int, length: int, positions: Positions, *, one_by_one: bool) -> torch.Tensor:
    """[3, n, heads, rows, size] → [n · heads, rows, size]."""
    _, n, heads, rows, size = split.shape
    q, k, v = split.view(3, n * heads, rows, size)
    at_once = max(1, MAX_SCORE_BYTES // (rows * rows * split.element_size()))
    bias = None if positions.bias is None else positions.bias.square(rows, q.dtype)
    if one_by_one or bias is not None:
        # Either some heads of one sequence, or all heads of some sequences.
        sequences = 1 if one_by_one else max(1, at_once // heads)
        at_once = max(part for part in range(1, heads + 1) if heads % part == 0 and part <= at_once) * sequences
    unseen = None
    if positions.window is not None and length > positions.window + 1:
        unseen = outside(rows, positions.window)
    mixed = torch.empty_like(q)
    for first in range(0, n * heads, at_once):
        part = slice(first, first + at_once)
        scores = torch.bmm(q[part], k[part].transpose(1, 2))
        if bias is not None:
            some = bias[first % heads :][:at_once]
            scores.view(-1, *some.shape).add_(some)
        if unseen is not None:
            scores.masked_fill_(unseen, -torch.inf)
        scores[:, :, keys:] = -torch.inf
        weights = scores.softmax(-1)
        if unseen is not None and keys < length:
            weights.nan_to_num_(0.0)  # of a query that sees no key
        torch.bmm(weights, v[part], out=mixed[part])
    return mixed


def _long(split: torch.Tensor, keys: int, bias: DistanceBias | None) -> torch.Tensor:
    """[3, n, heads, L, size] → [n, heads, L, size]."""
    q, k, v = split[0], split[1, :, :, :keys], split[2, :, :, :keys]
    if bias is None:
        return F.scaled_dot_product_attention(q, k, v, scale=1.0)
    length = q.shape[2]
    mixed = torch.empty_like(q)
    for first in range(0, length, BIASED_ROWS):
        rows = slice(first, min(first + BIASED_ROWS, length))
        mask = bias.rows(rows, length, q.dtype)[None, :, :, :keys]
        mixed[:, :, rows] = F.scaled_dot_product_attention(q[:, :, rows], k, v, attn_mask=mask, scale=1.0)
    return mixed
