"""Attention on packed sequences: batched products over sequences of equal length.

Sliding-window layers process blocks of queries, each with the keys within its window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from embert.engine.encoders.cpu import kernels
from embert.engine.encoders.cpu.positions import PLAIN, DistanceBias, Positions, Rotation, rotate
from embert.engine.encoders.cpu.runs import Group, threads_for_elements
from embert.engine.models.encoder_config import EncoderConfig

# Attention scores held at once. More are computed one after another, so that they stay in the cores' own caches.
MAX_SCORE_BYTES = 2 << 20

# In float32, sequences of this length are read and written where they lie, one after the other; shorter ones are
# copied, because one product of them all takes fewer calls.
IN_PLACE_LENGTH = 64

# In bfloat16, sequences of more tokens than SHORT_LENGTH are padded to a multiple of LENGTH_STEP. In any type those of
# fewer tokens than LENGTH_STEP are, from PADDED_LENGTH on: torch's softmax takes 5 µs for 12 heads of 16 tokens, and 46
# for 15. If the length is not a multiple of it, that softmax takes 1.2 to 1.7 times as long in place.
SHORT_LENGTH, LENGTH_STEP, PADDED_LENGTH = 64, 16, 8

# Sequences of more tokens take torch's own attention, which never holds all scores of a head.
LONG_LENGTH = 1024
BIASED_ROWS = 256  # queries whose biases are held at once there


def attention(
    qkv: torch.Tensor, groups: Sequence[Group], heads: int, positions: Positions = PLAIN, *, own_kernels: bool = False
) -> torch.Tensor:
    """[T, 3 · hidden] → [T, hidden]. Queries are scaled already. Rows after the last group become 0.

    With `own_kernels`, which take float32 and heads that kernels.can_attend, the rest of this file is not used.

    Batched products and a softmax: at BERT's lengths torch's scaled_dot_product_attention takes up to 2.5 times as long
    on a CPU (float32; equal at 512 tokens a sequence).

    A bfloat16 product has one kernel for each shape, which takes milliseconds to make and 0.7 MB to keep. So short
    sequences are multiplied in float32, which is not slower for them, and so are windows. Longer ones are multiplied
    one by one, with rows of zeros up to a multiple of LENGTH_STEP; the scores of these rows are masked.
    """
    tokens, hidden = qkv.shape[0], qkv.shape[1] // 3
    size = hidden // heads
    threads_for_elements(heads * sum(n * length**2 for _, n, length, _ in groups))
    context = qkv.new_empty(tokens, hidden)
    stop = 0
    for group in groups:
        start, n, length, keys = group
        stop = start + n * length
        if own_kernels:
            kernels.attend(qkv, group, heads, positions, context)
            continue
        whole = stop - start == tokens
        heads_qkv = (qkv if whole else qkv[start:stop]).view(n, length, 3, heads, size).permute(2, 0, 3, 1, 4)
        result = (context if whole else context[start:stop]).view(n, length, heads, size).transpose(1, 2)
        banded = is_banded(positions.window, length)
        in_place = qkv.dtype == torch.float32 and not banded and positions.rotation is None
        if in_place and IN_PLACE_LENGTH <= length <= LONG_LENGTH:
            for number in range(n):
                _short(heads_qkv[:, number], result[number], keys or length, positions)
            continue
        exact = qkv.dtype == torch.float32 or length <= SHORT_LENGTH or banded
        padded = (PADDED_LENGTH <= length < LENGTH_STEP and not banded) if exact else length <= LONG_LENGTH
        split = _split(heads_qkv, exact=exact, padded=padded, rotation=positions.rotation)
        rows = split.shape[3]
        if banded and positions.window is not None:
            mixed = windowed(split.view(3, n * heads, length, size), positions.window, keys or length)
        elif length > LONG_LENGTH:
            mixed = _long(split, keys or length, positions.bias)
        else:
            every = split.view(3, n * heads, rows, size)
            mixed = _short(
                every, torch.empty_like(every[0]), keys or length, positions, heads, apart=padded and not exact
            )
        mixed = mixed.view(n, heads, rows, size)
        result.copy_(mixed if rows == length else mixed[:, :, :length])
    if stop < tokens:
        context[stop:] = 0
    return context


def _split(heads_qkv: torch.Tensor, *, exact: bool, padded: bool, rotation: Rotation | None) -> torch.Tensor:
    """A copy of queries, keys and values [3, n, heads, L, size], the first two of them rotated.

    It is float32 where `exact`. Where `padded`, rows of zeros follow up to a multiple of LENGTH_STEP.
    """
    length = heads_qkv.shape[3]
    dtype = torch.float32 if exact else heads_qkv.dtype
    rows = -(-length // LENGTH_STEP) * LENGTH_STEP if padded else length
    split = torch.empty(*heads_qkv.shape[:3], rows, heads_qkv.shape[4], dtype=dtype)
    unpadded = split
    if rows > length:
        split[:, :, :, length:] = 0
        unpadded = split[:, :, :, :length]
    if rotation is None:
        unpadded.copy_(heads_qkv)
    else:
        rotate(unpadded[:2], heads_qkv[:2], *rotation(length))
        unpadded[2] = heads_qkv[2]
    return split


def _short(
    split: torch.Tensor,
    mixed: torch.Tensor,
    keys: int,
    positions: Positions,
    heads: int | None = None,
    *,
    apart: bool = False,
) -> torch.Tensor:
    """[3, n · heads, rows, size] → `mixed` [n · heads, rows, size]. `heads` None: of one sequence.

    Where `apart`, heads of different sequences are not multiplied at once.
    """
    q, k, v = split.unbind()
    count, rows, _ = q.shape
    heads = heads or count
    at_once = max(1, MAX_SCORE_BYTES // (rows * rows * split.element_size()))
    bias = None if positions.bias is None else positions.bias.square(rows, q.dtype)
    if apart or bias is not None:
        # Either some heads of one sequence, or all heads of some sequences.
        sequences = 1 if apart else max(1, at_once // heads)
        at_once = max(part for part in range(1, heads + 1) if heads % part == 0 and part <= at_once) * sequences
    unseen = None
    if positions.window is not None and rows > positions.window + 1:
        unseen = outside(rows, positions.window)
    k = k.transpose(1, 2)
    for first in range(0, count, at_once):
        part = slice(first, first + at_once)
        some = (q, k, v, mixed) if at_once >= count else (q[part], k[part], v[part], mixed[part])
        scores = torch.bmm(some[0], some[1])
        if bias is not None:
            own = bias[first % heads :][:at_once]
            scores.view(-1, *own.shape).add_(own)
        if unseen is not None:
            scores.masked_fill_(unseen, -torch.inf)
        if keys < rows:
            scores[:, :, keys:] = -torch.inf
        shares = torch.softmax(scores, -1, out=scores if rows % LENGTH_STEP == 0 else torch.empty_like(scores))
        if unseen is not None and keys < rows:
            shares.nan_to_num_(0.0)  # of a query that sees no key
        torch.bmm(shares, some[2], out=some[3])
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


BLOCK = 64  # queries that share their keys


def is_banded(window: int | None, length: int) -> bool:
    """True if blocks read fewer keys than all queries together."""
    return window is not None and length > 2 * (BLOCK + window)


def outside(length: int, window: int) -> torch.Tensor:
    """Mask of the keys that each query does not see: bool [length, length]."""
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
    k, v = (F.pad(operand, (0, 0, window, spare + window)) for operand in split[1:])
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
                operand[head].as_strided(shape, strides, operand[head].storage_offset() + offset) for operand in (k, v)
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


class DecoderAttention:
    """Attention of one layer of a decoder: grouped heads, norms of queries and keys, causal or not, with windows."""

    def __init__(self, config: EncoderConfig, norms: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """`norms` are the gammas of the RMSNorms of queries, which include the scores' scale, and of keys."""
        self._heads, self._kv_heads, self._size = config.heads, config.kv_heads, config.head_size
        self._norms, self._epsilon = norms, config.layer_norm_eps
        self._causal = config.causal

    def __call__(self, qkv: torch.Tensor, groups: Sequence[Group], positions: Positions) -> torch.Tensor:
        """[T, (heads + 2 · kv_heads) · size] → [T, heads · size]. Queries are scaled already unless they have norms.

        Rows after the last group become 0.
        """
        tokens, size, heads = len(qkv), self._size, self._heads
        threads_for_elements(heads * sum(n * length**2 for _, n, length, _ in groups))
        context = qkv.new_zeros(tokens, heads * size)
        for start, n, length, keys in groups:
            stop = start + n * length
            parts = qkv[start:stop].view(n, length, heads + 2 * self._kv_heads, size).transpose(1, 2)
            q, k, v = torch.split(parts, [heads, self._kv_heads, self._kv_heads], 1)
            if self._norms is not None:
                q, k = (
                    F.rms_norm(x.float(), (size,), gamma, self._epsilon)
                    for x, gamma in zip((q, k), self._norms, strict=True)
                )
            if positions.rotation is not None:
                q, k = (_rotate(x, positions.rotation) for x in (q, k))
            q, k = q.to(qkv.dtype), k.to(qkv.dtype)
            result = context[start:stop].view(n, length, heads, size).transpose(1, 2)
            self._attend(q, k[:, :, : keys or length], v[:, :, : keys or length], positions.window, result)
        return context

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, result: torch.Tensor
    ) -> None:
        """Queries [n, heads, L, size] with keys and values [n, kv_heads, K, size] → `result`, as the queries."""
        length, keys = q.shape[2], k.shape[2]
        grouped = self._heads != self._kv_heads
        if (window is None or length <= window + 1) and keys == length:
            result.copy_(F.scaled_dot_product_attention(q, k, v, is_causal=self._causal, scale=1.0, enable_gqa=grouped))
            return
        reach = length if window is None else window
        for first in range(0, length, BIASED_ROWS):  # each block of queries with the keys that it sees
            stop = min(first + BIASED_ROWS, length)
            start, end = max(0, first - reach), min(keys, stop if self._causal else stop + reach)
            if start >= end:
                result[:, :, first:stop] = 0
                continue
            distances = torch.arange(start, end) - torch.arange(first, stop)[:, None]
            seen = distances >= -reach
            seen &= distances <= (0 if self._causal else reach)
            mixed = F.scaled_dot_product_attention(
                q[:, :, first:stop], k[:, :, start:end], v[:, :, start:end], seen, scale=1.0, enable_gqa=grouped
            )
            result[:, :, first:stop] = mixed if keys == length else mixed.nan_to_num_(0.0)  # some may see no key


def _rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """[n, heads, L, size], rotated."""
    rotated = torch.empty_like(x)
    rotate(rotated, x, *rotation(x.shape[2]))
    return rotated
