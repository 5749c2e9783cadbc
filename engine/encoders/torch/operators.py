"""A transformer's operators in torch: those of encoders/cpu/operators.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from embert.engine.batch import cumulative
from embert.engine.encoders.cpu.heads import lengths_of
from embert.engine.encoders.cpu.kernels import Activation, Norm
from embert.engine.encoders.cpu.operators import HeadParts, Weight, convolve, stack_weights
from embert.engine.encoders.cpu.positions import Positions
from embert.engine.encoders.cpu.runs import Group, allowed_threads
from embert.engine.encoders.torch.attention import Attention
from embert.engine.heads.embedding import ACTIVATIONS, LayerNorm
from embert.engine.heads.token_rows import pool_rows
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.weights.adapters import LowRank

Floats = npt.NDArray[np.float32]

ACTIVATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda y: y,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "relu": torch.relu_,
    "silu": F.silu,
}


class TorchOperators:
    """Operators in torch. Products of layers are in `dtype`, sums of attention in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def enter(self, x: Floats) -> torch.Tensor:
        torch.set_num_threads(allowed_threads())  # takes a tenth of a microsecond
        return torch.from_numpy(x)

    def to_dtype(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self._dtype)

    def leave(self, x: torch.Tensor) -> Floats:
        rows: Floats = x.float().contiguous().numpy()
        return rows

    def linear(
        self, weights: Sequence[Weight], bias: Floats, activation: Activation, added: LowRank | None
    ) -> TorchLinear:
        return TorchLinear(stack_weights(weights), bias, self._dtype, activation, added)

    def projection(self, weight: Floats, bias: Floats) -> TorchLinear:
        return TorchLinear(weight, bias, self._dtype)

    def norm(self, norm: Norm) -> Callable[[torch.Tensor], torch.Tensor]:
        gamma, epsilon = torch.from_numpy(norm[0]), norm[2]
        if norm[1] is None:
            return lambda x: F.rms_norm(x.float(), x.shape[1:], gamma, epsilon).to(x.dtype)
        beta = torch.from_numpy(norm[1])
        return lambda x: F.layer_norm(x, x.shape[1:], gamma, beta, epsilon)

    def attention(self, config: EncoderConfig, parts: HeadParts) -> Attention:
        return Attention(config, parts)

    def convolution(
        self, taps: Floats, bias: Floats, unseen: Floats, after: int
    ) -> Callable[[torch.Tensor, Sequence[Group], Positions], torch.Tensor]:
        weights, offset, inputs = (torch.from_numpy(part) for part in (taps, bias, unseen))
        return lambda rows, groups, _: convolve(rows.float(), groups, weights, offset, inputs, after).to(rows.dtype)

    def whole_layer(self, *_: object) -> None:
        """Returns None: layers take several calls."""

    embeddings = whole_layer

    def head_linear(self, weight: Floats, bias: Floats | None, activation: str) -> Callable[[Floats], Floats]:
        after, offset = ACTIVATIONS[activation], np.float32(0) if bias is None else bias
        return lambda x: after(x @ weight.T + offset)

    def head_norm(self, norm: Norm) -> LayerNorm:
        return LayerNorm(*norm)

    def means(self, hidden: Floats, groups: Sequence[Group]) -> Floats:
        return pool_rows(hidden, cumulative(lengths_of(groups)), "mean")


class TorchLinear:
    """A linear layer with an activation. Adapters add to it in float32."""

    def __init__(
        self,
        weight: Floats,
        bias: Floats,
        dtype: torch.dtype,
        activation: Activation = "none",
        added: LowRank | None = None,
    ) -> None:
        self._weight, self._bias = (torch.from_numpy(part).to(dtype) for part in (weight, bias))
        self._activation = ACTIVATED[activation]
        self._added = None if added is None else [torch.from_numpy(part) for part in added]

    def __call__(
        self,
        x: torch.Tensor,
        adapter_mask: Floats | None = None,
        residual: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y = F.linear(x, self._weight, self._bias)
        if adapter_mask is not None and self._added is not None:
            left, right = self._added
            mask = torch.from_numpy(adapter_mask)[:, :, None]
            low_rank = F.linear(x.float(), right).view(*adapter_mask.shape, -1) * mask
            y += F.linear(low_rank.flatten(1), left)
        if residual is not None:
            y += residual
        y = self._activation(y)
        return y if gate is None else y.mul_(gate)
