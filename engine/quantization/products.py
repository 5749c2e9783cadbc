"""A whole product in eight bits, in numpy: what encoders are compared with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embert.engine.quantization.rotation import BLOCK
from embert.engine.quantization.rows import QuantizedRows
from embert.engine.quantization.weights import QuantizedWeight

__all__ = ["product", "sums"]


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
