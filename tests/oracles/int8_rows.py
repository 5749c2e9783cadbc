"""Quantizes rows in numpy as the CUDA kernels do, to the bit: by blocks (csrc/ops/blocks.cuh) and by quarters."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embert.engine.quantization.blocks import INNER, SET, SPACING, by_quarters, stored_order
from embert.engine.quantization.rows import LEVELS, QuantizedRows

Halves = npt.NDArray[np.float16]

LEAST = np.float16(2.0**-9)  # a block's maximum is at least this
ROOT = np.float32(math.sqrt(SET))


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
