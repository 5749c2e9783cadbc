"""DeBERTa's attention on packed sequences, in torch: products with the rows of distances are part of the scores.

The parts are computed by distance, not by key: of queries i … and all keys [m, K], the product with the rows of the
distances between them, K + m - 1, is a matrix whose diagonals are the rows of the scores. A view with other strides
adds it without an index. Sequences of equal length are computed together as far as MAX_SCORE_BYTES go, in float32
always.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from embert.engine.encoders.cpu import kernels
from embert.engine.encoders.cpu.attention import BIASED_ROWS, MAX_SCORE_BYTES
from embert.engine.encoders.cpu.runs import Group, threads_for_elements
from embert.engine.encoders.positions import relative_rows
from embert.engine.models.encoder_config import EncoderConfig

# Of one layer: what queries are multiplied by, and what keys are, for each row of the table; None: the part is absent.
PositionRows = tuple[torch.Tensor | None, torch.Tensor | None]


class DisentangledAttention:
    """Attention of one layer of DeBERTa. Queries are scaled already."""

    def __init__(self, config: EncoderConfig, rows: PositionRows, *, own_kernels: bool = False) -> None:
        """`rows` are float32 [2 · span, hidden] each; those that keys are multiplied by have the scores' scale.

        With `own_kernels`, which take float32 and heads that kernels.can_attend, the rest of this file is not used.
        """
        assert config.disentangled is not None  # noqa: S101 - the caller has asked
        self._heads, self._size, self._longest = config.heads, config.head_size, config.max_positions
        self._row_of = torch.from_numpy(relative_rows(config.disentangled, self._longest))
        by_head = [None if part is None else part.view(-1, self._heads, self._size).transpose(0, 1) for part in rows]
        self._of_queries, self._of_keys = (None if part is None else part.contiguous() for part in by_head)
        self._kernel_rows: kernels.DistanceRows | None = None
        if own_kernels:
            self._kernel_rows = kernels.DistanceRows(self._of_queries, self._of_keys, self._row_of.numpy())
            self._of_queries = self._of_keys = None

    def __call__(self, qkv: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
        """[T, 3 · hidden] → [T, hidden]. Rows after the last group become 0."""
        heads, size = self._heads, self._size
        threads_for_elements(heads * sum(n * length**2 for _, n, length, _ in groups))
        context = qkv.new_zeros(len(qkv), heads * size)
        if self._kernel_rows is not None:
            qkv = qkv.contiguous()
            for group in groups:
                kernels.attend_by_distance(qkv, group, heads, self._kernel_rows, context)
            return context
        for start, n, length, keys in groups:
            stop = start + n * length
            parts = qkv[start:stop].float().view(n, length, 3, heads, size).permute(2, 3, 0, 1, 4)
            q, k, v = parts.contiguous().unbind()  # [heads, n, L, size]
            k, v = k[:, :, : keys or length], v[:, :, : keys or length]
            result = context[start:stop].view(n, length, heads, size).permute(2, 0, 1, 3)
            at_once = max(1, MAX_SCORE_BYTES // (4 * length * 2 * length))  # pairs of a head and a sequence
            for head in range(0, heads, at_once):
                some = slice(head, min(head + at_once, heads))
                for first in range(0, n, step := max(1, at_once // heads)):
                    of = some, slice(first, first + step)
                    for row in range(0, length, BIASED_ROWS):
                        stop_row = min(row + BIASED_ROWS, length)
                        result[of][:, :, row:stop_row] = self._mixed(q[of][:, :, row:stop_row], k[of], v[of], row, some)
        return context

    def _mixed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, heads: slice) -> torch.Tensor:
        """Queries [h, n, m, size] from position `first` on, keys and values [h, n, K, size] → [h, n, m, size]."""
        h, n, m, size = q.shape
        keys = k.shape[2]
        width = keys + m - 1
        scores = q @ k.transpose(2, 3)
        # The rows of distances from 1 - m - first, of the last query and the first key, to keys - 1 - first.
        row_of = self._row_of[self._longest - m - first :][:width]
        if self._of_queries is not None:
            rows = self._of_queries[heads][:, row_of]
            by_distance = torch.bmm(q.reshape(h, n * m, size), rows.transpose(1, 2))  # [h, n · m, width]
            # Key j of query i is in column j - i + m - 1.
            scores += by_distance.as_strided((h, n, m, keys), (n * m * width, m * width, width - 1, 1), m - 1)
        if self._of_keys is not None:
            rows = self._of_keys[heads][:, row_of.flip(0)]
            by_distance = torch.bmm(k.reshape(h, n * keys, size), rows.transpose(1, 2))  # [h, n · K, width]
            # Query i of key j is in column i - j + K - 1.
            strides = (n * keys * width, keys * width, 1, width - 1)
            scores += by_distance.as_strided((h, n, m, keys), strides, keys - 1)
        return F.softmax(scores, -1) @ v
