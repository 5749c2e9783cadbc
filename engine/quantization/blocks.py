"""int8 on the CUDA encoder: rows quantized in blocks between two kernels, rows rotated by quarters, balanced columns.

Blocks: a row's largest magnitude is known only when all of its columns are. So the kernel that makes some of them
rounds a block by the block's own: the feed-forward part's first product 128 inner activations, attention a head of 64.
The product after it rescales a block's integers to the row's scale (csrc/ops/blocks.cuh).

Quarters: a thread rotates 32 columns by itself, in float16: eight neighbors, and the same eight of the row's other
quarters. Everything else is as in `rows` (csrc/ops/quantize.cu). tests/oracles/int8_rows.py quantizes rows in numpy.

Balance: a few columns of BERT's rows are many times larger than all others, and their weights are not. A column of x is
divided by its factor and W's is multiplied by it, so x · Wᵀ stays what it is. What rounding x costs grows with ‖W‖, and
what rounding W costs with ‖x‖. Both products of these norms are smallest where a factor is √(|x| / |W|) of its column
(Cauchy and Schwarz). On all-MiniLM-L6-v2 that takes a third off the error of an embedding. Factors are powers of two,
so multiplying or dividing by them is exact.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from embert.engine.quantization.rows import (
    QuantizedWeight,
    check_width,
    hadamard,
    round_weight,
)

Floats = npt.NDArray[np.float32]

INNER = 128  # columns of a block of inner activations
HEAD = 64  # columns of a head that is a block
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
    size = block // SPACING
    sets = weight.astype(np.float64).reshape(len(weight), -1, size, SPACING)
    rotated_weight = (hadamard(size) / math.sqrt(size) @ sets).reshape(weight.shape)
    return round_weight(rotated_weight[:, stored_order(weight.shape[1])])


SET = 32  # columns that are rotated together


def by_quarters(columns: int) -> npt.NDArray[np.int64]:
    """The columns of each set, in the order of its rotation: int64 [columns / 32, 32]."""
    sets, numbers = np.arange(columns // SET), np.arange(SET)
    return 8 * sets[:, None] + numbers // 8 * (columns // 4) + numbers % 8


def quarter_weight(weight: Floats, name: str) -> QuantizedWeight:
    """A stored weight [out, in] for such rows; with a scale a channel, as `quantize_weight` has it."""
    check_width(weight.shape[1], name)
    places = by_quarters(weight.shape[1])
    rotated_weight = np.empty(weight.shape, np.float64)
    rotated_weight[:, places] = weight[:, places].astype(np.float64) @ (hadamard(SET) / math.sqrt(SET))
    return round_weight(rotated_weight)


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
