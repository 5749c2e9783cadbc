"""Hopper's products that turn queries and keys, or gate, and those of pre-norm models, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.csrc import reference as ref
from tests.csrc.device import Device, numpy_type

pytestmark = pytest.mark.gpu

ROWS = (1, 8, 16, 17, 33, 64, 65, 100, 129, 257, 1000, 3001)
TYPES = (ref.FLOAT16, ref.BFLOAT16)
EPSILON = 1e-12
MOST_ROWS = 4096
POSITIONS = 8192


@dataclass
class Normed:
    """A LayerNorm before the product: "" (none), in the weights, or in the rows."""

    gamma_in: str
    gamma: ref.Doubles
    beta: ref.Doubles

    @classmethod
    def drawn(cls, random: np.random.Generator, width: int, gamma_in: str, dtype: int) -> Normed:
        gamma = ref.exact(ref.stored(random.uniform(0.2, 1.6, width), dtype))
        return cls(gamma_in, gamma, (random.standard_normal(width) / 4).astype(np.float32).astype(np.float64))

    def rows(self, random: np.random.Generator, rows: int, dtype: int) -> tuple[npt.NDArray[Any], ref.Doubles]:
        """The stored rows, and the rows that the product's weights multiply."""
        stored = ref.stored(random.standard_normal((rows, len(self.gamma))) + random.standard_normal((rows, 1)), dtype)
        if not self.gamma_in:
            return stored, ref.exact(stored)
        return stored, ref.layernorm(self.before(stored), self.gamma, self.beta, EPSILON)

    def before(self, stored: npt.NDArray[Any]) -> ref.Doubles:
        exact = ref.exact(stored)
        return exact / self.gamma if self.gamma_in == "rows" else exact

    def sums(self, stored: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        return ref.group_sums(self.before(stored)).astype(np.float32)

    def arguments(self, device: Device, exact_weight: ref.Doubles) -> dict[str, Any]:
        if not self.gamma_in:
            return {}
        found: dict[str, Any] = {"gamma": device.put(self.gamma.astype(np.float32)), "epsilon": EPSILON}
        found["beta"] = device.put(self.beta.astype(np.float32))
        if self.gamma_in == "rows":
            return found | {"prescaled_rows": True}
        return found | {"exact": device.put(exact_weight.astype(np.float32))}


class Fused:
    """A product on the device; W as the kernels want it, and what it computes in float64."""

    def __init__(
        self, device: Device, random: np.random.Generator, dtype: int, w_rows: int, width: int, gamma_in: str
    ) -> None:
        self.device, self.dtype = device, dtype
        self.norm = Normed.drawn(random, width, gamma_in, dtype)
        self.weight = ref.stored(random.standard_normal((w_rows, width)) / np.sqrt(width), dtype)
        self.bias = random.standard_normal(w_rows).astype(np.float32)
        self.columns = w_rows
        self.product: Any = None

    def prepare(self, out: int, kind: int = ref.NONE, **more: Any) -> None:
        self.columns = out
        weight = self.device.put(self.weight)
        norm = self.norm.arguments(self.device, ref.exact(self.weight))
        self.product = self.device.launch.product(
            "hopper",
            "",
            self.dtype,
            weight,
            self.device.put(self.bias),
            out,
            self.weight.shape[1],
            kind,
            **norm,
            **more,
        )

    def run(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        sums = self.device.put(self.norm.sums(x)) if self.norm.gamma_in else 0
        y = self.device.new(len(x) * self.columns * x.itemsize)
        self.product.run(self.device.launch, self.device.put(x), 0, len(x), y, sums)
        return self.device.get(y, (len(x), self.columns), numpy_type(self.dtype))

    def products(self, rows: ref.Doubles) -> ref.Doubles:
        exact: ref.Doubles = rows @ ref.exact(self.weight).T + self.bias
        return exact

    def check(self, random: np.random.Generator, wanted_of: Any) -> None:
        """`wanted_of` makes y of the product's columns."""
        for rows in ROWS:
            x, normed = self.norm.rows(random, rows, self.dtype)
            wanted = wanted_of(self.products(normed))
            # As good as rounding the LayerNorm's output, as in test_gemm.py; few rows scatter.
            rounded = ref.exact(ref.stored(normed, self.dtype)) if self.norm.gamma_in else normed
            separate = ref.error(ref.stored(wanted_of(self.products(rounded)), self.dtype), wanted)
            allowed = (1.3 if rows >= 64 else 1.6) * separate if self.norm.gamma_in else 1.2 * separate
            assert ref.error(self.run(x), wanted) <= allowed, rows


def rotated(
    qkv: ref.Doubles, table: ref.Doubles, positions: npt.NDArray[Any], size: int, rotary_dim: int
) -> ref.Doubles:
    """Queries and keys of [rows, 3 * hidden], whose pairs are neighbors already, turned by their positions."""
    rows, columns = qkv.shape
    heads = columns // 3 // size
    y = qkv.reshape(rows, 3, heads, size).copy()
    pairs = y[:, :2, :, :rotary_dim].reshape(rows, 2, heads, rotary_dim // 2, 2).copy()
    by = table[positions][:, None, None]
    a, b, cos, sin = pairs[..., 0], pairs[..., 1], by[..., 0], by[..., 1]
    y[:, :2, :, :rotary_dim] = np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(
        rows, 2, heads, rotary_dim
    )
    return y.reshape(rows, columns)


def rope_gemm(
    device: Device, random: np.random.Generator, dtype: int, heads: int, size: int, rotary_dim: int, gamma_in: str
) -> tuple[Fused, ref.Doubles, npt.NDArray[np.int32]]:
    hidden = heads * size
    fused = Fused(device, random, dtype, 3 * hidden, hidden, gamma_in)
    angles = random.uniform(-np.pi, np.pi, (POSITIONS, rotary_dim // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    positions = random.integers(0, POSITIONS, MOST_ROWS).astype(np.int32)
    fused.prepare(
        3 * hidden, head_size=size, rotary_dim=rotary_dim, rope_columns=2 * hidden, table=device.put(table),
        positions=device.put(positions),
    )  # fmt: skip
    return fused, table.astype(np.float64), positions


# Sizes of which a box of 64 columns has a head, two, a half, or heads that begin anywhere; all or some columns turned;
# keys that end within such a box.
HEADS = [(12, 64, 64), (12, 32, 32), (6, 128, 128), (16, 64, 32), (4, 96, 96), (10, 24, 24), (13, 40, 10), (15, 16, 16)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "size", "rotary_dim"), HEADS)
@pytest.mark.parametrize("gamma_in", ["", "weights", "rows"])
def test_rope_columns(
    device: Device, random: np.random.Generator, dtype: int, heads: int, size: int, rotary_dim: int, gamma_in: str
) -> None:
    fused, table, positions = rope_gemm(device, random, dtype, heads, size, rotary_dim, gamma_in)
    fused.check(random, lambda y: rotated(y, table, positions[: len(y)], size, rotary_dim))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", [ref.SILU, ref.GELU, ref.GELU_TANH, ref.RELU])
@pytest.mark.parametrize(("out", "width"), [(3072, 768), (1152, 768), (2624, 1024), (1000, 312)])
@pytest.mark.parametrize("gamma_in", ["", "weights", "rows"])
def test_gates(
    device: Device, random: np.random.Generator, dtype: int, kind: int, out: int, width: int, gamma_in: str
) -> None:
    fused = Fused(device, random, dtype, 2 * out, width, gamma_in)
    fused.prepare(out, kind, gated=True)
    fused.check(random, lambda y: ref.activation(y[:, ::2], kind) * y[:, 1::2])
