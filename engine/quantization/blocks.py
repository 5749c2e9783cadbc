"""int8 rows of the CUDA encoder between two kernels: quantized in blocks of columns.

A row's largest magnitude is known only when all of its columns are. So the kernel that makes some of them rounds a
block by the block's own: the feed-forward part's first product 128 inner activations, attention a head of 64. The
product after it rescales a block's integers to the row's scale. Integers agree with the kernels' to the
bit: csrc/ops/blocks.cuh.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embert.engine.quantization.rows import LEVELS, QuantizedRows, check_width, hadamard
from embert.engine.quantization.weights import QuantizedWeight, quantized

__all__ = ["HEAD", "Blocks", "aligned_rows", "block_rows", "block_weight", "rounded_blocks", "stored_order"]

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]

INNER = 128  # columns of a block of inner activations
HEAD = 64  # columns of a head that is a block
LEAST = np.float16(2.0**-9)  # a block's maximum is at least this
SPACING = 8  # columns of a block that are the same modulo this are rotated together


def stored_order(columns: int) -> npt.NDArray[np.int64]:
    """The column whose integer is stored at each place: int64 [columns].

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
    return quantized(rotated_weight[:, stored_order(weight.shape[1])])


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
