"""What adapters add to linear layers and tables on a CPU, where sequences of a run have different adapters.

Every row is multiplied by the low-rank matrices of all n adapters, which have few columns in total. `chosen` is a mask
that keeps the columns of the row's own adapter. So rows need no sorting, and results are batch-invariant.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from embert.engine.encoders.cpu.kernels import Activation
from embert.engine.encoders.cpu.linear import Linear, activated
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.weights.adapters import LowRank
from embert.engine.weights.checkpoint import Checkpoint

__all__ = ["AdaptedLinear", "Additions", "chosen_adapters"]


def chosen_adapters(adapters: torch.Tensor, config: EncoderConfig) -> torch.Tensor | None:
    """`chosen`: float32 [T, n], 1 where a token has an adapter. From their numbers [T], -1: none.

    None where no token has one: then nothing is computed.
    """
    if config.adapters is None or not (adapters >= 0).any():
        return None
    return (adapters[:, None] == torch.arange(len(config.adapters.names))).float()


class Additions:
    """The adapters' low-rank additions to the weights of one product, or to one table. Always float32."""

    def __init__(self, low_rank: LowRank) -> None:
        left, right = low_rank
        self._left = torch.from_numpy(np.concatenate(left, 1))  # [rows, n · rank]
        self._right = torch.from_numpy(np.concatenate(right))  # [n · rank, columns]

    @classmethod
    def of(
        cls, config: EncoderConfig, checkpoint: Checkpoint, names: Sequence[str], scales: Sequence[float] = (1.0,)
    ) -> Additions | None:
        """Those of weights that are multiplied as one, the second below the first; None where no adapter adds any.

        `scales` are those of the weights, besides the adapters' own.
        """
        parts = [checkpoint.low_rank(name) for name in names]
        adapters, first = config.adapters, next(filter(None, parts), None)
        if adapters is None or first is None:
            return None
        scaled = []
        for name, part, scale in zip(names, parts, scales, strict=True):
            rows = checkpoint.stored(name).shape[0]
            left = np.zeros((len(adapters.names), rows, adapters.rank), np.float32) if part is None else part.left
            right = first.right if part is None else part.right
            scaled.append(LowRank(left * np.float32(adapters.scale * scale), right))
        return cls(_joined(scaled))

    def add_to_product(self, y: torch.Tensor, x: torch.Tensor, chosen: torch.Tensor) -> None:
        """Add to `y` [T, rows], the weight's product with `x` [T, columns], in place."""
        low_rank = _kept(F.linear(x.float(), self._right), chosen)
        if y.dtype == torch.float32:
            y.addmm_(low_rank, self._left.T)
        else:
            y += F.linear(low_rank, self._left)

    def of_table(self, ids: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """float32 [T, columns], for rows of a table: int64 [T]."""
        return _kept(F.embedding(ids, self._left), chosen) @ self._right


class AdaptedLinear:
    """A linear layer with an activation, to which adapters may add: see Linear."""

    def __init__(self, linear: Linear, additions: Additions | None, activation: Activation) -> None:
        """`linear` has the activation itself where there are no additions: they come before it."""
        self._linear, self._additions, self._activation = linear, additions, activation

    @property
    def plain(self) -> Linear | None:
        """The linear layer, where no adapter adds to it."""
        return self._linear if self._additions is None else None

    def __call__(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor | None,
        residual: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As of Linear; `chosen` is that of `chosen_adapters`."""
        if self._additions is None:
            return self._linear(x, residual, gate)
        y = self._linear(x, residual)
        if chosen is not None:
            self._additions.add_to_product(y, x, chosen)
        y = activated(y, self._activation)
        return y if gate is None else y.mul_(gate)


def _kept(every: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[T, n · rank] with zeros in place of the adapters that a row does not have."""
    return (every.view(*chosen.shape, -1) * chosen[:, :, None]).flatten(1)


def _joined(parts: Sequence[LowRank]) -> LowRank:
    """As one, the second below the first."""
    if all(np.array_equal(part.right, parts[0].right) for part in parts):  # as jina's query, key and value have it
        return LowRank(np.concatenate([part.left for part in parts], 1), parts[0].right)
    n, rows, rank = parts[0].left.shape[0], [part.left.shape[1] for part in parts], parts[0].left.shape[2]
    left = np.zeros((n, sum(rows), len(parts) * rank), np.float32)
    for number, part in enumerate(parts):
        start = sum(rows[:number])
        left[:, start : start + rows[number], number * rank : (number + 1) * rank] = part.left
    return LowRank(left, np.concatenate([part.right for part in parts], 1))
