"""Factors that balance the columns of a product's operands before both are rounded to int8.

A few columns of BERT's rows are many times larger than all others, and their weights are not. A column of x is divided
by its factor and W's is multiplied by it, so x · Wᵀ stays what it is. What rounding x costs grows with ‖W‖, and what
rounding W costs with ‖x‖. Both products of these norms are smallest where a factor is √(|x| / |W|) of its column
(Cauchy and Schwarz). On all-MiniLM-L6-v2 that takes a third off the error of an embedding.

Factors are powers of two, so multiplying or dividing by them is exact.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["MOST", "balance"]

Floats = npt.NDArray[np.float32]

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
