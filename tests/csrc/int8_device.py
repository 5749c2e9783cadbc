"""Products in 8 bits on the device, and what they are given, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from embert.engine.quantization.blocks import block_weight, quarter_weight
from tests.csrc import reference as ref
from tests.csrc.device import Device

EPSILON = 1e-12
Floats = npt.NDArray[Any]


def sums_of(rows: Floats, parts: int = 1) -> Floats:
    """Row statistics of rows [T, columns]: float32 [T, groups · parts, 2]."""
    return ref.group_sums(rows.astype(np.float64), parts).astype(np.float32)


class Product:
    """A product of 8 bits on the device; the memory for quantized rows can be read."""

    def __init__(
        self, device: Device, random: np.random.Generator, out: int, width: int, kind: int = ref.NONE,
        norm: tuple[Floats, Floats] | None = None, of_residual: bool = False, most: int = 3001,
    ) -> None:  # fmt: skip
        self.device, self.kind, self.of_residual = device, kind, of_residual
        self.inner = width > out  # a feed-forward part's second product
        weight = (random.standard_normal((out, width)) / np.sqrt(width)).astype(np.float32)
        self.weight, self.scales = (block_weight if self.inner else quarter_weight)(weight, "weight")
        self.bias = random.standard_normal(out).astype(np.float32)
        self.norm = norm
        self.data, self.row_scales = device.new(-(-most // 32) * 32 * width), device.new(most * 4)
        self.vectors = [device.put(each) for each in (self.weight, self.scales, self.bias)]
        self.vectors += [0, 0] if norm is None else [device.put(each.astype(np.float32)) for each in norm]
        weight, scales, bias, gamma, beta = self.vectors
        try:
            self.product: Any = device.launch.product(
                "hopper", "", ref.FLOAT16, weight, bias, *self.weight.shape, kind, gamma, beta, of_residual, EPSILON,
                scales=scales, block=128 if self.inner else 0, data=self.data, row_scales=self.row_scales,
            )  # fmt: skip
        except RuntimeError as error:
            pytest.skip(str(error))

    def run(self, x: npt.NDArray[np.float16], residual: npt.NDArray[np.float16] | None = None) -> Floats:
        """y, and what it leaves in `self.y_stats`."""
        rows, out, device = len(x), len(self.bias), self.device
        y, y_stats = device.new(rows * out * 2), device.new(rows * out // 2)
        normed = x if residual is None else residual
        self.product.run(
            device.launch, device.put(x), 0 if residual is None else device.put(residual), rows, y,
            0 if self.norm is None else device.put(sums_of(normed)), 1, 0 if residual is None else y_stats,
        )  # fmt: skip
        found = device.get(y, (rows, out), np.float16)
        if residual is not None:
            found_sums = device.get(y_stats, (rows, out // 128, self.product.splits, 2), np.float32)
            while found_sums.shape[2] > 1:  # ops/row_stats.cuh
                found_sums = found_sums[:, :, ::2] + found_sums[:, :, 1::2]
            self.y_stats = found_sums[:, :, 0]
        return found

    def sums(self, rows: int) -> tuple[npt.NDArray[np.int64], Floats]:
        """The exact sums of what the last run multiplied, and the scales of its rows."""
        q = self.device.get(self.data, (rows, self.weight.shape[1]), np.int8)
        sums = q.astype(np.float64) @ self.weight.astype(np.float64).T
        return sums.astype(np.int64), self.device.get(self.row_scales, (rows,), np.float32)

    def scaled(self, rows: int) -> tuple[Floats, Floats]:
        """The product without its bias as FP32 has it, and the scales of columns."""
        sums, scales = self.sums(rows)
        return sums.astype(np.float32) * scales[:, None], self.scales
