"""Activations in eight bits: each row, or each block of a row, has a scale of its own."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embert.engine.quantization.rotation import BLOCK, rotated

__all__ = ["LEVELS", "QuantizedRows", "quantized", "quantized_blocks", "quantized_rows"]

Floats = npt.NDArray[np.float32]

LEVELS = 127  # the largest integer; -128 is not used, so that the range is symmetric
ROOT = np.float32(math.sqrt(BLOCK))


class QuantizedRows(NamedTuple):
    """x · H / √128 is about `integers` · `scales`."""

    integers: npt.NDArray[np.int8]  # [n, columns], -127 … 127
    scales: Floats  # [n, 1], or [n, columns / 128] where each block has one


def quantized(y: Floats) -> QuantizedRows:
    """Integers and scales of rotated rows [n, columns], each of which gets one scale.

    With m the largest magnitude: integers are rint(y · (127 / m)), halves to the even one, both operations rounded to
    float32; the scale is m / 127 / √128. A row of zeros has integers and scale 0.
    """
    largest = np.abs(y).max(1, keepdims=True)
    empty = largest == 0
    inverse = np.where(empty, np.float32(0), np.float32(LEVELS) / np.where(empty, np.float32(1), largest))
    return QuantizedRows(np.rint(y * inverse).astype(np.int8), largest / np.float32(LEVELS) / ROOT)


def quantized_rows(x: Floats) -> QuantizedRows:
    """Rows [n, columns] before the rotation, with a scale a row."""
    return quantized(rotated(x))


def quantized_blocks(x: Floats) -> QuantizedRows:
    """Rows [n, columns] before the rotation, with a scale for every 128 columns."""
    blocks = quantized(rotated(x).reshape(-1, BLOCK))
    return QuantizedRows(blocks.integers.reshape(x.shape), blocks.scales.reshape(len(x), -1))
