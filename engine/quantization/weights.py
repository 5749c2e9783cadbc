"""Weights in eight bits: rotated when the model is loaded, with a scale for each output channel."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embert.engine.quantization.rotation import BLOCK, check_width, hadamard
from embert.engine.quantization.rows import LEVELS

__all__ = ["QuantizedWeight", "quantized", "quantized_weight"]


class QuantizedWeight(NamedTuple):
    """w · H / √128 is about `integers` · `scales`."""

    integers: npt.NDArray[np.int8]  # [out, in], -127 … 127
    scales: npt.NDArray[np.float32]  # [out]


def quantized_weight(weight: npt.NDArray[np.float32], name: str) -> QuantizedWeight:
    """A stored weight [out, in], rotated in float64; with m a channel's largest magnitude, rint(w / (m / 127)).

    `name` is the weight's, for the error. The scale is rounded to float32 last. Raises UnsupportedModel where `in` is
    no multiple of 128.
    """
    outputs, inputs = weight.shape
    check_width(inputs, name)
    exact = hadamard().astype(np.float64) / math.sqrt(BLOCK)
    return quantized((weight.astype(np.float64).reshape(-1, BLOCK) @ exact).reshape(outputs, inputs))


def quantized(turned: npt.NDArray[np.float64]) -> QuantizedWeight:
    """Integers and scales of a rotated weight [out, in]."""
    scales = np.abs(turned).max(1, keepdims=True) / LEVELS
    integers = np.rint(turned / np.where(scales == 0, 1.0, scales)).astype(np.int8)
    return QuantizedWeight(integers, scales[:, 0].astype(np.float32))
