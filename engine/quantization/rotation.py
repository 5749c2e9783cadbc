"""The rotation of columns: Sylvester's Hadamard matrix of 128 rows, in natural order."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from embert.engine.errors import UnsupportedModel

__all__ = ["BLOCK", "check_width", "hadamard", "rotated"]

Floats = npt.NDArray[np.float32]

BLOCK: Final = 128  # columns that are rotated together


def hadamard(rows: int = BLOCK) -> npt.NDArray[np.int8]:
    """Sylvester's matrix, of 1 and -1: int8 [rows, rows]. `rows` is a power of two. It is its own transpose."""
    numbers = np.arange(rows)
    common = np.bitwise_count(numbers[:, None] & numbers)
    return np.where(common % 2, -1, 1).astype(np.int8)


def rotated(x: Floats) -> Floats:
    """x · H for every 128 columns, with H of 1 and -1: float32 [n, columns] → float32 [n, columns].

    Butterflies with strides 1, 2, 4 … 64, each sum rounded to float32. H / √128 is orthonormal; that factor goes into
    the scale of a row, see `rows.quantized_rows`.
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
