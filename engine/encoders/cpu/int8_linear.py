"""An int8 linear layer on a CPU: quantization/ defines the result, oneDNN multiplies.

oneDNN multiplies an unsigned and a signed matrix, so activations are stored as q + 128, with zero point 128. torch
reaches it through an undocumented operator of its compiler. So loading a model tests it on rows that overflow 16 bits:
CPUs without VNNI add neighboring products in 16 bits, which saturate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from embert.engine.encoders.cpu.kernels import Activation
from embert.engine.encoders.cpu.linear import activated
from embert.engine.encoders.cpu.threads import threads_for_elements, threads_for_products
from embert.engine.errors import UnsupportedModel
from embert.engine.quantization.rows import BLOCK, LEVELS, hadamard
from embert.engine.quantization.weights import QuantizedWeight

__all__ = ["Int8Linear", "check_exact", "exact_sums", "quantized"]

ZERO = 128  # what stands for 0 in unsigned activations
# Columns that one product rotates; butterflies of larger strides follow, in place. On a core of an EPYC 16 rows of 384
# columns take 21 µs, 128 of 384 55 and 512 of 1 536 706. With 32 columns they take 21, 63 and 984, with 128 24, 135 and
# 2 479.
FIRST = 16
_FIRST_OF = torch.from_numpy(hadamard(FIRST).astype(np.float32))
# Of a row's largest magnitude, so that 127 divided by it is finite. A row of zeros then has integers of 0.
_SMALLEST = 2.0**-120
_LEVELS = torch.tensor(float(LEVELS))  # a tensor, because torch divides numbers by multiplying with a reciprocal
SCALE = 1 / LEVELS / math.sqrt(BLOCK)  # times a row's largest magnitude: the scale of its integers
# Added to a number of a magnitude below 2²², it leaves the nearest integer, halves to the even one, plus ZERO in the
# low byte of the sum. That is one pass in place of four that multiply, round, convert and shift.
_INTEGERS_FROM = 1.5 * 2.0**23 + ZERO


@dataclass(frozen=True, slots=True)
class Quantized:
    """Rotated rows in int8."""

    shifted: torch.Tensor  # uint8 [n, columns]: q + 128
    largest: torch.Tensor  # float32 [n, 1]: the largest magnitude; times SCALE it is the scale


def rotated(x: torch.Tensor) -> torch.Tensor:
    """As quantization.rows.rotated, except for rounding: terms are added in another order."""
    y = torch.mm(x.reshape(-1, FIRST), _FIRST_OF)
    stride = FIRST
    while stride < BLOCK:
        first, second = y.view(-1, 2, stride).unbind(1)
        first.add_(second)
        torch.sub(first, second, alpha=2, out=second)  # of the sum, so that no third buffer is needed
        stride *= 2
    return y.view(x.shape)


def quantized(x: torch.Tensor) -> Quantized:
    """As quantization.rows.quantized_rows: float32 [n, columns]."""
    y = rotated(x)
    largest = y.abs().amax(1, keepdim=True)
    torch.addcmul(_integers_from(y.shape[1]), y, torch.div(_LEVELS, largest.clamp_min(_SMALLEST)), out=y)
    return Quantized(y.view(torch.int32).to(torch.uint8), largest)


@functools.cache
def _integers_from(columns: int) -> torch.Tensor:
    """A row of _INTEGERS_FROM: with two factors that are the same for a row's columns, torch's loop takes long."""
    return torch.full((columns,), _INTEGERS_FROM)


def exact_sums(shifted: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """The sums of products of q and the packed weight, times a scale a column: float32 [n, out].

    `zeros` are the weight's zero points, int32 [out].
    """
    multiply = torch.ops.onednn.qlinear_pointwise.default
    y: torch.Tensor = multiply(shifted, 1.0, ZERO, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return y


class Int8Linear:
    """See linear.Linear: float32 in, float32 out."""

    def __init__(self, weights: Sequence[QuantizedWeight], bias: torch.Tensor, activation: Activation = "none") -> None:
        """`weights` lie one below the other; `bias` is float32 [out] of all."""
        integers = torch.from_numpy(np.concatenate([weight.integers for weight in weights]))
        self._scales = torch.from_numpy(np.concatenate([weight.scales for weight in weights])) * SCALE
        self._weight = torch.ops.onednn.qlinear_prepack(integers, None)
        self._zeros = torch.zeros(len(integers), dtype=torch.int32)
        self._bias = bias
        self._activation = activation

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See Linear."""
        threads_for_elements(x.numel())
        rows = quantized(x)
        threads_for_products(rows.shifted, len(self._bias))
        y = exact_sums(rows.shifted, self._weight, self._scales, self._zeros)
        threads_for_elements(y.numel())
        torch.addcmul(self._bias, y, rows.largest, out=y)
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
    sums: object
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        sums = exact_sums(x, packed, torch.ones(16), torch.zeros(16, dtype=torch.int32))
        expected = (x.to(torch.float32) - ZERO) @ weight.to(torch.float32).T
        if torch.equal(sums, expected):
            return
        reason = "lacks VNNI: it adds int8 products in 16 bits, which saturate"
    except (AttributeError, RuntimeError) as error:  # no such operator in this torch; it does not run here
        reason = f"has no int8 products in this torch: {str(error).partition(chr(10))[0]}"
    raise UnsupportedModel(f"int8 is not supported on this CPU, which {reason}; use --dtype float32 or bfloat16")
