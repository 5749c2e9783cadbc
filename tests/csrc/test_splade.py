"""Maxima over texts, from which SPLADE makes its pairs, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from embert.engine.encoders.cuda.encoder import _cublaslt_library
from tests.csrc import reference as ref
from tests.csrc.device import Device

pytestmark = pytest.mark.gpu

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int32]

LENGTHS = [1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 512]  # the last ones span several tiles of 128 rows
TILE = 128  # columns
CASES = [
    ("hopper", ref.FLOAT16), ("hopper", ref.BFLOAT16),
    ("cublaslt", ref.FLOAT16), ("cublaslt", ref.BFLOAT16), ("cublaslt", ref.FLOAT32),
]  # fmt: skip
SHAPES = [(30522, 768), (50265, 384), (1000, 312), (128, 64)]  # vocabulary, hidden


def pitch_of(columns: int) -> int:
    return -(-columns // TILE) * TILE


def starts_of(lengths: list[int]) -> Integers:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def texts_of(lengths: list[int]) -> Integers:
    return np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)


def largest(x: ref.Doubles, weight: ref.Doubles, bias: ref.Doubles, lengths: list[int]) -> ref.Doubles:
    """max(0, x·Wᵀ + bias) over the rows of each text, [texts, columns]; some columns at a time."""
    starts, parts = starts_of(lengths)[:-1], []
    for first in range(0, len(weight), 8192):
        part = slice(first, first + 8192)
        logits = (torch.from_numpy(x) @ torch.from_numpy(weight[part]).T).numpy() + bias[part]
        parts.append(np.maximum.reduceat(logits, starts, axis=0))
    maxima: ref.Doubles = np.maximum(np.concatenate(parts, axis=1), 0)
    return maxima


class Product:
    """A decoder on the device, and maxima of any rows."""

    def __init__(self, device: Device, random: np.random.Generator, provider: str, dtype: int, out: int, width: int):
        self.weight = ref.stored(random.standard_normal((out, width)) / np.sqrt(width), dtype)
        bias = random.standard_normal(out) - 1
        if provider == "cublaslt":  # adds what its type holds
            bias = ref.exact(ref.stored(bias, dtype))
        self.bias = bias.astype(np.float32)
        self.device, self.out, self.pitch = device, out, pitch_of(out)
        try:
            self.product: Any = device.launch.maxima(
                provider, _cublaslt_library(), dtype, device.put(self.weight), device.put(self.bias), out, width
            )
        except RuntimeError as error:
            pytest.skip(str(error))

    def run(self, x: npt.NDArray[Any], lengths: list[int]) -> Floats:
        """[texts, out]"""
        maxima = self.device.put(np.zeros((len(lengths), self.pitch), np.float32))
        text_of = self.device.put(texts_of(lengths))
        self.product.run(self.device.launch, self.device.put(x), text_of, len(x), maxima)
        return self.device.get(maxima, (len(lengths), self.pitch), np.float32)[:, : self.out]

    def exact(self, x: npt.NDArray[Any], lengths: list[int]) -> ref.Doubles:
        return largest(ref.exact(x), ref.exact(self.weight), ref.exact(self.bias), lengths)


@pytest.mark.parametrize(("provider", "dtype"), CASES)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_maxima_against_float64(
    device: Device, random: np.random.Generator, provider: str, dtype: int, out: int, width: int
) -> None:
    product = Product(device, random, provider, dtype, out, width)
    batches = [LENGTHS, [1], [512], [1] * 70, [8, 3, 300, 16] * 5]
    for lengths in batches if out < 30000 else batches[:2]:
        x = ref.drawn(random, (sum(lengths), width), dtype)
        wanted = product.exact(x, lengths)
        # Our own kernel rounds nothing to 16 bits; cuBLASLt's products are.
        limit = 2e-5 if provider == "hopper" else ref.allowed(wanted, dtype)
        assert ref.error(product.run(x, lengths), wanted) <= limit, lengths
