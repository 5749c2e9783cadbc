"""int8 on the CUDA encoder: rows quantized in blocks between two kernels, rows rotated by quarters, balanced columns.

Blocks: a row's largest magnitude is known only when all of its columns are. So the kernel that makes some of them
rounds a block by the block's own: the feed-forward part's first product 128 inner activations, attention a head of 64.
The product after it rescales a block's integers to the row's scale (csrc/ops/blocks.cuh).

Quarters: a thread rotates 32 columns by itself, in float16: eight neighbors, and the same eight of the row's other
quarters. Everything else is as in `rows` (csrc/ops/quantize.cu). Integers agree with the kernels' to the bit.

Balance: a few columns of BERT's rows are many times larger than all others, and their weights are not. A column of x is
divided by its factor and W's is multiplied by it, so x · Wᵀ stays what it is. What rounding x costs grows with ‖W‖, and
what rounding W costs with ‖x‖. Both products of these norms are smallest where a factor is √(|x| / |W|) of its column
(Cauchy and Schwarz). On all-MiniLM-L6-v2 that takes a third off the error of an embedding. Factors are powers of two,
so multiplying or dividing by them is exact.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embert.engine.quantization.rows import (
    LEVELS,
    QuantizedRows,
    QuantizedWeight,
    check_width,
    hadamard,
    rounded_weight,
)

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]

INNER = 128  # columns of a block of inner activations
HEAD = 64  # columns of a head that is a block
LEAST = np.float16(2.0**-9)  # a block's maximum is at least this
SPACING = 8  # columns of a block that are the same modulo this are rotated together


def stored_order(columns: int) -> npt.NDArray[np.int64]:
    """The column whose integer is stored at each index: int64 [columns].

    A lane's four bytes of 16 columns are two neighbors of the first eight and the same of the other eight.
    """
    place = np.arange(columns)
    lane, byte = place % 16 // 4, place % 4
    return place // 16 * 16 + 2 * lane + byte % 2 + byte // 2 * 8


def block_weight(weight: Floats, name: str, block: int = INNER) -> QuantizedWeight:
    """A stored weight [out, in] for such rows: rotated, with a scale a channel, its columns in the order of theirs."""
    check_width(weight.shape[1], name)
    rotated = block // SPACING
    sets = weight.astype(np.float64).reshape(len(weight), -1, rotated, SPACING)
    rotated_weight = (hadamard(rotated) / math.sqrt(rotated) @ sets).reshape(weight.shape)
    return rounded_weight(rotated_weight[:, stored_order(weight.shape[1])])


class Blocks(NamedTuple):
    """Rows with one scale for each block: the output of the first product."""

    integers: npt.NDArray[np.int8]  # [n, columns], in the stored order
    maxima: Halves  # [n, columns / block]: of rotated magnitudes


def rounded_blocks(x: Halves, block: int = INNER) -> Blocks:
    """Rows x [n, columns] in int8: attention's context, or a quarter of inner activations.

    The columns of a block that are the same modulo 8 are multiplied by the Hadamard matrix, strides 1, 2, 4 …, each sum
    rounded to float16. With m the largest magnitude of a block's elements y, at least 2⁻⁹, and t = float16(127 / m),
    its integers are rint(y · t), halves to the even one.
    """
    rows, columns = x.shape
    rotated = block // SPACING
    y = x.reshape(rows, -1, rotated, SPACING)
    stride = 1
    while stride < rotated:
        pairs = y.reshape(rows, -1, rotated // (2 * stride), 2, stride, SPACING)
        first, second = pairs[:, :, :, 0], pairs[:, :, :, 1]
        y = np.stack([first + second, first - second], 3).reshape(y.shape)
        stride *= 2
    blocks = y.reshape(rows, -1, block)
    maxima = np.maximum(np.abs(blocks).max(-1), LEAST)
    inverse = (np.float32(LEVELS) / maxima.astype(np.float32)).astype(np.float16)
    integers = np.rint(blocks.astype(np.float32) * inverse[:, :, None].astype(np.float32)).astype(np.int8)
    return Blocks(integers.reshape(rows, columns)[:, stored_order(columns)], maxima)


def aligned_rows(blocks: Blocks) -> QuantizedRows:
    """The same with a scale a row.

    With m a block's maximum, M the row's and f = rint(m · (128 / M)), a block's integers q become rint(q · f / 128),
    halves to the even one. f is rounded to float32 with 1 024 added, then to an integer. The scale is M / 127 over the
    root of how many columns are rotated together; of inner activations that root is 4, and takes back the quarter.
    """
    block = blocks.integers.shape[1] // blocks.maxima.shape[1]
    maxima = blocks.maxima.astype(np.float32)
    largest = maxima.max(1, keepdims=True)
    exact = maxima.astype(np.float64) * (np.float32(128) / largest)
    factors = (exact + 1024).astype(np.float32).astype(np.float16).astype(np.float32) - np.float32(1024)
    integers = np.rint(blocks.integers * np.repeat(factors, block, 1) / 128).astype(np.int8)
    root = np.float32(1 if block == INNER else math.sqrt(block // SPACING))
    return QuantizedRows(integers, largest * (np.float32(1) / (np.float32(LEVELS) * root)))


def block_rows(x: Halves, block: int = INNER) -> QuantizedRows:
    """Rows x [n, columns] in int8 with a scale a row: [n, 1]."""
    return aligned_rows(rounded_blocks(x, block))


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
    return rounded_weight(rotated_weight)


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


MOST = 16.0  # and at least its reciprocal, so that float16 holds what is divided


def balance(magnitudes: npt.NDArray[np.float64], weight: Floats) -> Floats:
    """The factors of columns: float32 [in], their geometric mean about 1.

    `magnitudes` [in]: root mean squares of x's columns; `weight` [out, in]. A column of zeros in either has factor 1.
    """
    of_weight = np.sqrt(np.square(weight, dtype=np.float64).mean(0))
    known = (magnitudes > 0) & (of_weight > 0) & np.isfinite(magnitudes) & np.isfinite(of_weight)
    exponents = np.zeros(len(magnitudes))
    exponents[known] = (np.log2(magnitudes[known]) - np.log2(of_weight[known])) / 2
    if known.any():
        exponents[known] -= exponents[known].mean()
    limit = np.log2(MOST)
    factors: Floats = np.exp2(np.rint(exponents.clip(-limit, limit))).astype(np.float32)
    return factors
