"""Matrices in 8 bits for the CUDA extension: rotated, then rounded with a scale for each row.

Each block of 128 columns is multiplied with the orthonormal Hadamard matrix of order 128. The extension rotates rows of
activations in the same way (csrc/norm/quantise.h), so products do not change, and outlier columns are spread.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK", "quantised"]

BLOCK = 128  # columns
LARGEST = 127.0


@functools.cache
def _hadamard() -> npt.NDArray[np.float64]:
    """Sylvester's, in natural order: float64 [BLOCK, BLOCK], orthonormal."""
    made: npt.NDArray[np.float64] = np.ones((1, 1))
    while len(made) < BLOCK:
        made = np.block([[made, made], [made, -made]])
    return np.asarray(made / np.sqrt(BLOCK))


def quantised(weight: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """A matrix [out, in] in 8 bits: int8 [out, in] of -127 … 127, and a scale for each row, float32 [out].

    `in` must be a multiple of BLOCK.
    """
    out, columns = weight.shape
    rotated = (weight.astype(np.float64).reshape(-1, BLOCK) @ _hadamard()).reshape(out, columns)
    scales = np.abs(rotated).max(axis=1) / LARGEST
    rounded = np.rint(rotated / np.where(scales == 0, 1, scales)[:, None])
    return rounded.astype(np.int8), scales.astype(np.float32)
