"""A linear layer in eight bits on a CPU: quantization/ says what it computes, oneDNN multiplies.

oneDNN multiplies an unsigned and a signed matrix, so activations go in as q + 128, and 128 is their zero point.
torch reaches it through an operator of its compiler, which it does not document. So it is tried on rows that overflow
16 bits when a model is loaded: CPUs without VNNI add neighbouring products in 16 bits, which saturate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from embert.engine.encoders.torch.linear import Activation, activated
from embert.engine.errors import UnsupportedModel
from embert.engine.quantization.rotation import BLOCK, hadamard
from embert.engine.quantization.rows import LEVELS
from embert.engine.quantization.weights import QuantisedWeight

__all__ = ["Int8Linear", "check_exact", "exact_sums", "quantised"]

ZERO = 128  # what stands for 0 in unsigned activations
# Columns that one product rotates; butterflies of larger strides follow. For many rows one product with all of H takes
# twice as long (0.46 ms against 0.23 for 512 rows of 384 columns on a core of an EPYC), and butterflies alone 0.38 ms.
# For few rows it is the calls that cost.
FIRST, FEW_ROWS = 32, 64
_FIRST_OF, _ALL_OF = (torch.from_numpy(hadamard(rows).astype(np.float32)) for rows in (FIRST, BLOCK))
# Of a row's largest magnitude, so that 127 divided by it is finite. A row of zeros then has integers of 0.
_SMALLEST = 2.0**-120
_LEVELS = torch.tensor(float(LEVELS))  # a tensor, because torch divides numbers by multiplying with a reciprocal
_SCALE = 1 / LEVELS / math.sqrt(BLOCK)


@dataclass(frozen=True, slots=True)
class Quantised:
    """Rotated rows in eight bits."""

    shifted: torch.Tensor  # uint8 [n, columns]: q + 128
    scales: torch.Tensor  # float32 [n, 1]


def rotated(x: torch.Tensor) -> torch.Tensor:
    """As quantization.rotation.rotated, but for rounding: terms are added in another order."""
    if len(x) <= FEW_ROWS:
        return torch.mm(x.reshape(-1, BLOCK), _ALL_OF).view(x.shape)
    y = torch.mm(x.reshape(-1, FIRST), _FIRST_OF)
    stride = FIRST
    while stride < BLOCK:
        pairs = y.view(-1, 2, stride)
        y = torch.empty_like(pairs)
        torch.add(pairs[:, 0], pairs[:, 1], out=y[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=y[:, 1])
        stride *= 2
    return y.view(x.shape)


def quantised(x: torch.Tensor) -> Quantised:
    """As quantization.rows.quantised_rows: float32 [n, columns]."""
    y = rotated(x)
    largest = torch.maximum(y.amax(1, keepdim=True), y.amin(1, keepdim=True).neg_())
    integers = y.mul_(torch.div(_LEVELS, largest.clamp_min(_SMALLEST))).round_().to(torch.int8)
    return Quantised(integers.view(torch.uint8).bitwise_xor_(ZERO), largest.mul_(_SCALE))


def exact_sums(shifted: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """The sums of products of q and the packed weight, times a scale a column: float32 [n, out].

    `zeros` are the weight's zero points, int32 [out].
    """
    multiply = torch.ops.onednn.qlinear_pointwise.default
    y: torch.Tensor = multiply(shifted, 1.0, ZERO, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return y


class Int8Linear:
    """See linear.Linear: float32 in, float32 out."""

    def __init__(self, weights: Sequence[QuantisedWeight], bias: torch.Tensor, activation: Activation = "none") -> None:
        """`weights` lie one below the other; `bias` is float32 [out] of all."""
        integers = torch.from_numpy(np.concatenate([weight.integers for weight in weights]))
        self._scales = torch.from_numpy(np.concatenate([weight.scales for weight in weights]))
        self._weight = torch.ops.onednn.qlinear_prepack(integers, None)
        self._zeros = torch.zeros(len(integers), dtype=torch.int32)
        self._bias = bias
        self._activation = activation

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See Linear."""
        rows = quantised(x)
        y = exact_sums(rows.shifted, self._weight, self._scales, self._zeros)
        torch.addcmul(self._bias, y, rows.scales, out=y)
        if residual is not None:
            return y.add_(residual)
        if gate is not None:
            return y.mul_(gate)
        return activated(y, self._activation)


def check_exact() -> None:
    """Raise UnsupportedModel where oneDNN's sums are not exact here, or it has none."""
    x = torch.full((2, BLOCK), 2 * ZERO - 1, dtype=torch.uint8)  # 127, the largest, in every column
    x[1] = 1  # -127
    weight = torch.full((16, BLOCK), LEVELS, dtype=torch.int8)
    weight[1::2] = -LEVELS
    found: object
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        found = exact_sums(x, packed, torch.ones(16), torch.zeros(16, dtype=torch.int32))
        wanted = (x.to(torch.float32) - ZERO) @ weight.to(torch.float32).T
        if torch.equal(found, wanted):
            return
        reason = "adds products of eight bits in sixteen, which saturate: it lacks VNNI"
    except (AttributeError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        reason = f"has no products of eight bits in this torch: {str(error).partition(chr(10))[0]}"
    raise UnsupportedModel(f"int8 is not supported on this CPU, which {reason}; use --dtype float32 or bfloat16")
