"""Low-rank additions of adapters, for sequences of a run that have different ones.

Every row is multiplied by the low-rank matrices of all n adapters, which have few columns in total, and a mask keeps
the columns of the row's own adapter. So rows need no sorting, and results are batch-invariant.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.weights.adapters import LowRank
from embert.engine.weights.checkpoint import Checkpoint

Floats = npt.NDArray[np.float32]


def select_adapters(adapters: npt.NDArray[np.int64], config: EncoderConfig) -> Floats | None:
    """Returns the `adapter_mask`: float32 [T, n], 1 where a token has an adapter; None if no token has one.

    `adapters` [T] are their numbers, -1: none.
    """
    if config.adapters is None or not (adapters >= 0).any():
        return None
    adapter_mask: Floats = (adapters[:, None] == np.arange(len(config.adapters.names))).astype(np.float32)
    return adapter_mask


def mask_columns(every: Floats, adapter_mask: Floats) -> Floats:
    """Zeroes the columns of adapters that a row does not have: [T, n · rank]."""
    return (every.reshape(*adapter_mask.shape, -1) * adapter_mask[:, :, None]).reshape(every.shape)


def additions(
    config: EncoderConfig, checkpoint: Checkpoint, names: Sequence[str], scales: Sequence[float] = (1.0,)
) -> LowRank | None:
    """Additions to weights that are multiplied as one, or to a table: [rows, n · rank] and [n · rank, columns].

    None where no adapter adds any. `scales` are those of the weights, in addition to the adapters' own.
    """
    parts = [checkpoint.low_rank(name) for name in names]
    adapters, first = config.adapters, next(filter(None, parts), None)
    if adapters is None or first is None:
        return None
    factors = []
    for name, part, scale in zip(names, parts, scales, strict=True):
        rows = checkpoint.stored(name).shape[0]
        left = np.zeros((len(adapters.names), rows, adapters.rank), np.float32) if part is None else part.left
        right = first.right if part is None else part.right
        factors.append(LowRank(left * np.float32(adapters.scale * scale), right))
    left, right = _join(factors)
    return LowRank(np.concatenate(left, 1), np.concatenate(right))


def _join(parts: Sequence[LowRank]) -> LowRank:
    """Joins low-rank matrices, the second below the first."""
    if all(np.array_equal(part.right, parts[0].right) for part in parts):  # as jina's query, key and value have it
        return LowRank(np.concatenate([part.left for part in parts], 1), parts[0].right)
    n, rows, rank = parts[0].left.shape[0], [part.left.shape[1] for part in parts], parts[0].left.shape[2]
    left = np.zeros((n, sum(rows), len(parts) * rank), np.float32)
    for number, part in enumerate(parts):
        start = sum(rows[:number])
        left[:, start : start + rows[number], number * rank : (number + 1) * rank] = part.left
    return LowRank(left, np.concatenate([part.right for part in parts], 1))
