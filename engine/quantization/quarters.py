"""int8 rows of the CUDA encoder: rotated by quarters, in float16.

A thread rotates 32 columns by itself: eight neighbors, and the same eight of the row's other quarters. Everything else
is as in `rows`. Integers agree with the kernel's to the bit: csrc/ops/quantize.cu.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from embert.engine.quantization.rows import LEVELS, QuantizedRows, check_width, hadamard
from embert.engine.quantization.weights import QuantizedWeight, quantized

__all__ = ["by_quarters", "quarter_rows", "quarter_weight"]

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]

SET = 32  # columns that are rotated together
ROOT = np.float32(math.sqrt(SET))


def by_quarters(columns: int) -> npt.NDArray[np.int64]:
    """The columns of each set, in the order of its rotation: int64 [columns / 32, 32]."""
    sets, numbers = np.arange(columns // SET), np.arange(SET)
    return 8 * sets[:, None] + numbers // 8 * (columns // 4) + numbers % 8


def quarter_weight(weight: Floats, name: str) -> QuantizedWeight:
    """A stored weight [out, in] for such rows; with a scale a channel, as `weights.quantized_weight` has it."""
    check_width(weight.shape[1], name)
    places = by_quarters(weight.shape[1])
    rotated_weight = np.empty(weight.shape, np.float64)
    rotated_weight[:, places] = weight[:, places].astype(np.float64) @ (hadamard(SET) / math.sqrt(SET))
    return quantized(rotated_weight)


def quarter_rows(x: Halves) -> QuantizedRows:
    """Rows x [n, columns] in int8, with a scale each.

    A set is multiplied by 2⁻⁵ and by the Hadamard matrix, strides 2, 4, 8, 16, then 1, each sum rounded to float16.
    With m the row's largest magnitude, k = clip(-⌊log₂ m⌋, -15, 15) and t = float16(127 / (m · 2ᵏ)): integers are
    rint(y · 2ᵏ · t), halves to the even one; the scale is √32 · 2⁻ᵏ / t. A row of zeros has integers and scale 0.
    """
    places = by_quarters(x.shape[1])
    sets = x[:, places] * np.float16(1 / SET)  # [n, sets, 32]
    for stride in (2, 4, 8, 16, 1):
        pairs = sets.reshape(*sets.shape[:2], -1, 2, stride)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        sets = np.stack([first + second, first - second], -2).reshape(sets.shape)
    y = np.empty_like(x)
    y[:, places] = sets
    largest = np.abs(y).max(1, keepdims=True).astype(np.float32)
    empty = largest == 0
    largest = np.where(empty, np.float32(1), largest)
    shift = np.clip(1 - np.frexp(largest)[1], -15, 15)
    inverse = np.where(empty, np.float16(0), (np.float32(LEVELS) / np.ldexp(largest, shift)).astype(np.float16))
    near_one = np.ldexp(y, shift).astype(np.float32)  # what is far below the largest was rounded to float16
    integers = np.rint(near_one * inverse.astype(np.float32)).astype(np.int8)
    scales = np.ldexp(ROOT, -shift) / np.where(empty, np.float32(1), inverse.astype(np.float32))
    return QuantizedRows(integers, np.where(empty, np.float32(0), scales).astype(np.float32))
