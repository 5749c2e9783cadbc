"""int8 rows and weights: rotated columns, with a scale for each row or output channel.

The rotation is Sylvester's Hadamard matrix of 128 rows, in natural order. Weights are rotated when a model is loaded.
`product` is the whole int8 product in numpy, the reference for encoders.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from embert.engine.errors import UnsupportedModel

Floats = npt.NDArray[np.float32]

BLOCK: Final = 128  # columns that are rotated together


def hadamard(rows: int = BLOCK) -> npt.NDArray[np.int8]:
    """Sylvester's matrix, of 1 and -1: int8 [rows, rows]. `rows` is a power of two. It is its own transpose."""
    numbers = np.arange(rows)
    common = np.bitwise_count(numbers[:, None] & numbers)
    return np.where(common % 2, -1, 1).astype(np.int8)


def rotate(x: Floats) -> Floats:
    """x · H for every 128 columns, with H of 1 and -1: float32 [n, columns] → float32 [n, columns].

    Butterflies with strides 1, 2, 4 … 64, each sum rounded to float32. H / √128 is orthonormal; that factor goes into
    the scale of a row, see `quantize_rows`.
    """
    y = x.astype(np.float32).reshape(-1, BLOCK)
    for stage in range(BLOCK.bit_length() - 1):
        pairs = y.reshape(len(y), -1, 2, 1 << stage)
        y = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).reshape(-1, BLOCK)
    return y.reshape(x.shape)


def check_width(columns: int, name: str) -> None:
    """Raise UnsupportedModel where the input of the weight `name` has no whole blocks of columns."""
    if columns % BLOCK:
        raise UnsupportedModel(
            f"int8 needs inputs of a multiple of {BLOCK} columns; {name} has {columns}: use float32, float16 or "
            "bfloat16"
        )


LEVELS = 127  # the largest integer; -128 is not used, so that the range is symmetric
ROOT = np.float32(math.sqrt(BLOCK))


class QuantizedRows(NamedTuple):
    """x · H / √128 is about `integers` · `scales`."""

    integers: npt.NDArray[np.int8]  # [n, columns], -127 … 127
    scales: Floats  # [n, 1]


def quantize(y: Floats) -> QuantizedRows:
    """Integers and scales of rotated rows [n, columns], each of which gets one scale.

    With m the largest magnitude: integers are rint(y · (127 / m)), halves to the even one, both operations rounded to
    float32; the scale is m / 127 / √128. A row of zeros has integers and scale 0.
    """
    largest = np.abs(y).max(1, keepdims=True)
    empty = largest == 0
    inverse = np.where(empty, np.float32(0), np.float32(LEVELS) / np.where(empty, np.float32(1), largest))
    return QuantizedRows(np.rint(y * inverse).astype(np.int8), largest / np.float32(LEVELS) / ROOT)


def quantize_rows(x: Floats) -> QuantizedRows:
    """Rows [n, columns] before the rotation, with a scale a row."""
    return quantize(rotate(x))


class QuantizedWeight(NamedTuple):
    """w · H / √128 is about `integers` · `scales`."""

    integers: npt.NDArray[np.int8]  # [out, in], -127 … 127
    scales: npt.NDArray[np.float32]  # [out]


def quantize_weight(weight: npt.NDArray[np.float32], name: str) -> QuantizedWeight:
    """A stored weight [out, in], rotated in float64; with m a channel's largest magnitude, rint(w / (m / 127)).

    `name` is the weight's, for the error. The scale is rounded to float32 last. Raises UnsupportedModel where `in` is
    not a multiple of 128.
    """
    outputs, inputs = weight.shape
    check_width(inputs, name)
    exact = hadamard().astype(np.float64) / math.sqrt(BLOCK)
    return round_weight((weight.astype(np.float64).reshape(-1, BLOCK) @ exact).reshape(outputs, inputs))


def round_weight(rotated_weight: npt.NDArray[np.float64]) -> QuantizedWeight:
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
    """x · weightᵀ + bias: float32 [n, out]."""
    return sums(rows, weight).astype(np.float32) * rows.scales * weight.scales + bias
