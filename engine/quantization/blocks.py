"""Inner activations of the feed-forward part in eight bits as the CUDA encoder has them: in blocks of 128 columns.

The feed-forward part's first product leaves its rows in eight bits, a block of 128 columns at a time, because a row's
largest magnitude is known only when all of its columns are. Its second product turns a block's integers into those of
the row's scale. Integers agree with the kernels' to the bit: csrc/norm/blocks.cuh.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embert.engine.quantization.rotation import check_width, hadamard
from embert.engine.quantization.rows import LEVELS, QuantisedRows
from embert.engine.quantization.weights import QuantisedWeight, quantised

__all__ = ["Blocks", "aligned_rows", "block_rows", "block_weight", "rounded_blocks", "stored_order"]

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]

BLOCK = 128  # columns that have a scale together
ROTATED = 16  # of them that are rotated together: every eighth
LEAST = np.float16(2.0**-9)  # a block's maximum is at least this


def stored_order(columns: int) -> npt.NDArray[np.int64]:
    """The column whose integer is stored at each place: int64 [columns].

    A lane's four bytes of 16 columns are two neighbours of the first eight and the same of the other eight.
    """
    place = np.arange(columns)
    lane, byte = place % 16 // 4, place % 4
    return place // 16 * 16 + 2 * lane + byte % 2 + byte // 2 * 8


def block_weight(weight: Floats, name: str) -> QuantisedWeight:
    """A stored weight [out, in] for such rows: rotated, with a scale a channel, its columns in the order of theirs."""
    check_width(weight.shape[1], name)
    sets = weight.astype(np.float64).reshape(len(weight), -1, ROTATED, BLOCK // ROTATED)
    turned = np.einsum("obic,ij->objc", sets, hadamard(ROTATED) / math.sqrt(ROTATED)).reshape(weight.shape)
    return quantised(turned[:, stored_order(weight.shape[1])])


class Blocks(NamedTuple):
    """Rows of which each block has a scale of its own: what the first product leaves."""

    integers: npt.NDArray[np.int8]  # [n, columns], in the stored order
    maxima: Halves  # [n, columns / 128]: of rotated magnitudes


def rounded_blocks(x: Halves) -> Blocks:
    """Rows x [n, columns], a quarter of the activations, in eight bits.

    Of each block, the 16 columns that are the same modulo 8 are multiplied by the Hadamard matrix, strides 1, 2, 4 and
    8, each sum rounded to float16. With m the largest magnitude of a block's elements y, at least 2⁻⁹, and
    t = float16(127 / m), its integers are rint(y · t), halves to the even one.
    """
    rows, columns = x.shape
    y = x.reshape(rows, -1, ROTATED, BLOCK // ROTATED)
    for stride in (1, 2, 4, 8):
        pairs = y.reshape(rows, -1, ROTATED // (2 * stride), 2, stride, BLOCK // ROTATED)
        first, second = pairs[:, :, :, 0], pairs[:, :, :, 1]
        y = np.stack([first + second, first - second], 3).reshape(y.shape)
    blocks = y.reshape(rows, -1, BLOCK)
    maxima = np.maximum(np.abs(blocks).max(-1), LEAST)
    inverse = (np.float32(LEVELS) / maxima.astype(np.float32)).astype(np.float16)
    integers = np.rint(blocks.astype(np.float32) * inverse[:, :, None].astype(np.float32)).astype(np.int8)
    return Blocks(integers.reshape(rows, columns)[:, stored_order(columns)], maxima)


def aligned_rows(blocks: Blocks) -> QuantisedRows:
    """The same with a scale a row.

    With m a block's maximum, M the row's and f = rint(128 · m / M), a block's integers q become rint(q · f / 128),
    halves to the even one. The scale is M / 127.
    """
    maxima = blocks.maxima.astype(np.float32)
    largest = maxima.max(1, keepdims=True)
    factors = np.rint(maxima * (np.float32(128) / largest))
    integers = np.rint(blocks.integers * np.repeat(factors, BLOCK, 1) / 128).astype(np.int8)
    return QuantisedRows(integers, largest * np.float32(1 / LEVELS))


def block_rows(x: Halves) -> QuantisedRows:
    """Rows x [n, columns], a quarter of the activations, in eight bits with a scale a row: [n, 1]."""
    return aligned_rows(rounded_blocks(x))
