"""int8 weights, rotated when the model is loaded, with a scale for each output channel.

`product` is the whole int8 product in numpy, the reference for encoders.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embert.engine.quantization.rows import BLOCK, LEVELS, QuantizedRows, check_width, hadamard

__all__ = ["QuantizedWeight", "product", "quantized", "quantized_weight", "sums"]


class QuantizedWeight(NamedTuple):
    """w · H / √128 is about `integers` · `scales`."""

    integers: npt.NDArray[np.int8]  # [out, in], -127 … 127
    scales: npt.NDArray[np.float32]  # [out]


def quantized_weight(weight: npt.NDArray[np.float32], name: str) -> QuantizedWeight:
    """A stored weight [out, in], rotated in float64; with m a channel's largest magnitude, rint(w / (m / 127)).

    `name` is the weight's, for the error. The scale is rounded to float32 last. Raises UnsupportedModel where `in` is
    no multiple of 128.
    """
    outputs, inputs = weight.shape
    check_width(inputs, name)
    exact = hadamard().astype(np.float64) / math.sqrt(BLOCK)
    return quantized((weight.astype(np.float64).reshape(-1, BLOCK) @ exact).reshape(outputs, inputs))


def quantized(rotated_weight: npt.NDArray[np.float64]) -> QuantizedWeight:
    """Integers and scales of a rotated weight [out, in]."""
    scales = np.abs(rotated_weight).max(1, keepdims=True) / LEVELS
    integers = np.rint(rotated_weight / np.where(scales == 0, 1.0, scales)).astype(np.int8)
    return QuantizedWeight(integers, scales[:, 0].astype(np.float32))


def sums(rows: QuantizedRows, weight: QuantizedWeight) -> npt.NDArray[np.int32]:
    """The exact sums, of whole rows: int32 [n, out]. Of `in` columns none is over in · 127²."""
    # float64 holds these integers exactly, and its products are faster than those of integers.
    exact = rows.integers.astype(np.float64) @ weight.integers.astype(np.float64).T
    return exact.astype(np.int32)


def product(rows: QuantizedRows, weight: QuantizedWeight, bias: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """x · weightᵀ + bias for rows with one scale each, or with one for every 128 columns: float32 [n, out]."""
    if rows.scales.shape[1] == 1:
        return sums(rows, weight).astype(np.float32) * rows.scales * weight.scales + bias
    y = np.zeros((len(rows.integers), len(bias)), np.float32)
    for block in range(rows.scales.shape[1]):
        columns = slice(block * BLOCK, (block + 1) * BLOCK)
        part = QuantizedRows(rows.integers[:, columns], rows.scales[:, block : block + 1])
        y += sums(part, QuantizedWeight(weight.integers[:, columns], weight.scales)).astype(np.float32) * part.scales
    return y * weight.scales + bias
