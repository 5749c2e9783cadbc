"""Attention on packed sequences, in torch and in float32: blocks of queries with the keys that they may attend to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from embert.engine.encoders.cpu.operators import HeadParts
from embert.engine.encoders.cpu.positions import Positions, Rotation
from embert.engine.encoders.cpu.runs import Group
from embert.engine.encoders.positions import relative_rows
from embert.engine.models.encoder_config import EncoderConfig

QUERIES = 256  # of a block: biases and masks of no more are held at once


class Attention:
    """Attention of one layer of any kind: with grouped heads, causal, with a window, biases or disentangled."""

    def __init__(self, config: EncoderConfig, parts: HeadParts) -> None:
        self._heads, self._kv_heads, self._size = config.heads, config.kv_heads, config.head_size
        self._causal, self._epsilon, self._longest = config.causal, config.layer_norm_eps, config.max_positions
        self._norms = None if parts.norms is None else [torch.from_numpy(gamma) for gamma in parts.norms]
        self._distances: list[torch.Tensor | None] = []  # of queries and of keys: [heads, 2 · span, size]
        if config.disentangled is not None and parts.distances is not None:
            for part in parts.distances:
                by_head = None if part is None else part.reshape(len(part), self._heads, -1).swapaxes(0, 1)
                self._distances.append(None if by_head is None else torch.from_numpy(by_head))
            self._row_of = torch.from_numpy(relative_rows(config.disentangled, self._longest))

    def __call__(self, qkv: torch.Tensor, groups: Sequence[Group], positions: Positions) -> torch.Tensor:
        """[T, (heads + 2 · kv_heads) · size] → [T, heads · size]. Every row is in a group."""
        size, heads = self._size, self._heads
        context = qkv.new_empty(len(qkv), heads * size)
        for start, n, length, keys, *_ in groups:
            stop = start + n * length
            parts = qkv[start:stop].float().view(n, length, heads + 2 * self._kv_heads, size).transpose(1, 2)
            q, k, v = parts.tensor_split((heads, heads + self._kv_heads), 1)
            if self._norms is not None:
                rows = [
                    F.rms_norm(x, (size,), gamma, self._epsilon)
                    for x, gamma in zip((q, k, v), self._norms, strict=False)
                ]
                q, k, v = (*rows, v)[:3]
            if positions.rotation is not None:
                q, k = (rotate(x, positions.rotation) for x in (q, k))
            k, v = k[:, :, : keys or length], v[:, :, : keys or length]
            result = context[start:stop].view(n, length, heads, size).transpose(1, 2)
            # Disentangled scores take memory for each of several sequences.
            step = 1 if self._distances else n
            for sequence in range(0, n, step):
                of = slice(sequence, sequence + step)
                for first in range(0, length, QUERIES):
                    block = slice(first, min(first + QUERIES, length))
                    result[of, :, block] = self._attend(q[of, :, block], k[of], v[of], first, positions)
        return context

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, positions: Positions
    ) -> torch.Tensor:
        """Queries [n, heads, m, size] from position `first` on, keys and values [n, kv_heads, K, size] → as queries."""
        stop, window = first + q.shape[2], positions.window
        start, end = 0, min(k.shape[2], stop) if self._causal else k.shape[2]
        if window is not None:
            start, end = max(0, first - window), min(end, stop + window)
        if start >= end:
            return torch.zeros_like(q)
        k, v = k[:, :, start:end], v[:, :, start:end]
        distances = torch.arange(start, end) - torch.arange(first, stop)[:, None]
        mask: torch.Tensor | None = None
        if positions.bias is not None:
            longest = (positions.bias.shape[1] + 1) // 2
            mask = torch.from_numpy(positions.bias[:, distances.numpy() + longest - 1])
        elif self._distances:
            mask = self._by_distance(q, k, distances)
        hidden = torch.zeros_like(distances, dtype=torch.bool)
        if window is not None:
            hidden |= distances.abs() > window
        if self._causal:
            hidden |= distances > 0
        if hidden.any():
            mask = torch.zeros(distances.shape) if mask is None else mask
            mask = mask.masked_fill(hidden, -torch.inf)
        is_grouped = self._heads != self._kv_heads
        context = F.scaled_dot_product_attention(q, k, v, mask, scale=1.0, enable_gqa=is_grouped)
        nothing = hidden.all(1)
        return context.masked_fill(nothing[:, None], 0.0) if nothing.any() else context

    def _by_distance(self, q: torch.Tensor, k: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
        """The parts of DeBERTa's scores by distance: [n, heads, m, K]."""
        rows = self._row_of[distances + self._longest - 1]
        scores = torch.zeros(*q.shape[:3], k.shape[2])
        of_queries, of_keys = self._distances
        if of_queries is not None:
            scores += (q @ of_queries.mT).gather(3, rows.expand_as(scores))
        if of_keys is not None:
            scores += (k @ of_keys.mT).gather(3, rows.T.expand_as(scores.mT)).mT
        return scores


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """[n, heads, L, size], rotated. Columns past those of the tables' pairs are copied."""
    cosines, sines = (torch.from_numpy(table) for table in rotation(x.shape[2]))
    low, high, rest = x.tensor_split((cosines.shape[1], 2 * cosines.shape[1]), 3)
    return torch.cat([low * cosines - high * sines, high * cosines + low * sines, rest], 3)
