"""Linear layers on a CPU, fused with the activation or the residual that follows, and with adapters.

Our own kernels (kernels.py) compute them where they run, and `F.linear` elsewhere. int8 needs the kernels.

Sequences of a run may have different adapters. Every row is multiplied by the low-rank matrices of all n adapters,
which have few columns in total, and a mask keeps the columns of the row's own adapter. So rows need no sorting, and
results are batch-invariant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from embert.engine.encoders.cpu.kernels import Activation, linear
from embert.engine.encoders.cpu.runs import threads_for_products
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.weights.adapters import LowRank
from embert.engine.weights.checkpoint import Checkpoint


class Linear(Protocol):
    """activation(x · weightᵀ + bias). Without an activation, a residual may be added, or a gate multiplied."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, in] → [T, out]. `residual` and `gate` are [T, out] and are not changed; at most one is given."""
        ...


class TorchLinear:
    """`F.linear`, which runs on every CPU."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, activation: Activation = "none") -> None:
        self._weight = weight
        self._bias = bias
        self._activation = activation

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        threads_for_products(x, len(self._bias))
        return _finish(F.linear(x, self._weight, self._bias), residual, gate, self._activation)


def _finish(
    y: torch.Tensor, residual: torch.Tensor | None, gate: torch.Tensor | None, activation: Activation
) -> torch.Tensor:
    """Applies what follows a product, in place."""
    if residual is not None:
        return y.add_(residual)
    return activated(y, activation) if gate is None else y.mul_(gate)


def activated(y: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation of each element; `y` may be changed."""
    if activation == "gelu":
        return F.gelu(y)
    if activation == "gelu_tanh":
        return F.gelu(y, approximate="tanh")
    if activation == "silu":
        return F.silu(y, inplace=True)
    return y.relu_() if activation == "relu" else y


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor, activation: Activation = "none", *, own_kernels: bool
) -> Linear:
    """`weight` is [out, in] and `bias` [out], both in the dtype to compute in: float32 with `own_kernels`."""
    return (linear if own_kernels else TorchLinear)(weight, bias, activation)


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
        """Reads the additions to weights that are multiplied as one; None where no adapter adds any.

        `scales` are those of the weights, in addition to the adapters' own.
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
        return cls(_join(scaled))

    def add_to_product(self, y: torch.Tensor, x: torch.Tensor, chosen: torch.Tensor) -> None:
        """Add to `y` [T, rows], the weight's product with `x` [T, columns], in place."""
        low_rank = _select(F.linear(x.float(), self._right), chosen)
        if y.dtype == torch.float32:
            y.addmm_(low_rank, self._left.T)
        else:
            y += F.linear(low_rank, self._left)

    def of_table(self, ids: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """float32 [T, columns], for rows of a table: int64 [T]."""
        return _select(F.embedding(ids, self._left), chosen) @ self._right


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
        """See Linear; `chosen` is that of `chosen_adapters`."""
        if self._additions is None:
            return self._linear(x, residual, gate)
        y = self._linear(x, residual)
        if chosen is not None:
            self._additions.add_to_product(y, x, chosen)
        y = activated(y, self._activation)
        return y if gate is None else y.mul_(gate)


def _select(every: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[T, n · rank] with zeros in place of the adapters that a row does not have."""
    return (every.view(*chosen.shape, -1) * chosen[:, :, None]).flatten(1)


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
