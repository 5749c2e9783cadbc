"""Kernels that encoders newer than BERT need, against float64: RoPE columns, gates."""

from __future__ import annotations

import numpy as np
import pytest

from tests.csrc import reference as ref
from tests.csrc.device import Device, numpy_type

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize(
    ("heads", "size", "rotary_dim"), [(12, 64, 64), (4, 32, 32), (3, 64, 24), (2, 40, 10), (1, 128, 2)]
)
@pytest.mark.parametrize("rows", [1, 33, 3000])
def test_rope_columns(
    device: Device, random: np.random.Generator, dtype: int, heads: int, size: int, rotary_dim: int, rows: int
) -> None:
    hidden = heads * size
    qkv = ref.drawn(random, (rows, 3 * hidden), dtype)
    angles = random.uniform(-np.pi, np.pi, (512, rotary_dim // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    positions = random.integers(0, 512, rows).astype(np.int32)
    address = device.put(qkv)
    device.launch.rope(
        dtype, address, rows, 3 * hidden, size, rotary_dim, 2 * hidden, device.put(table), device.put(positions)
    )
    got = device.get(address, qkv.shape, numpy_type(dtype))
    parts = ref.exact(qkv).reshape(rows, 3, heads, size)
    by = table[positions].astype(np.float64)[:, None, None]
    pairs = parts[:, :2, :, :rotary_dim].reshape(rows, 2, heads, rotary_dim // 2, 2).copy()
    a, b, cos, sin = pairs[..., 0], pairs[..., 1], by[..., 0], by[..., 1]
    parts[:, :2, :, :rotary_dim] = np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(rows, 2, heads, -1)
    wanted = parts.reshape(rows, -1)
    assert ref.error(got, wanted) <= ref.allowed(wanted, dtype)
    # Values are not touched, nor are columns past the turned ones.
    still = np.ones((3, heads, size), np.bool_)
    still[:2, :, :rotary_dim] = False
    assert got[:, still.reshape(-1)].tobytes() == qkv[:, still.reshape(-1)].tobytes()


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("kind", [ref.GELU, ref.GELU_TANH, ref.RELU, ref.SILU, ref.NONE])
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (129, 1152), (2000, 3072)])
def test_gate(device: Device, random: np.random.Generator, dtype: int, kind: int, rows: int, columns: int) -> None:
    x = ref.drawn(random, (rows, 2 * columns), dtype, 2.0)
    gates, values = ref.exact(x)[:, ::2], ref.exact(x)[:, 1::2]
    wanted = ref.activation(gates, kind) * values
    y = device.new(x.nbytes // 2)
    device.launch.gate(dtype, kind, device.put(x), rows, columns, y)
    assert ref.error(device.get(y, wanted.shape, numpy_type(dtype)), wanted) <= ref.allowed(wanted, dtype)


@pytest.mark.parametrize("dtype", [ref.FLOAT16, ref.FLOAT32])
def test_silu_far_from_0(device: Device, dtype: int) -> None:
    """Gates of which only the sign is left, and those that no exponential holds."""
    gates = np.array([-60000, -1000, -100, -88, -50, -20, -0.0, 0, 20, 100, 1000, 60000], np.float64)
    x = ref.stored(np.tile(np.stack([gates, np.ones_like(gates)], axis=1).reshape(1, -1), 2), dtype)
    y = device.new(x.nbytes // 2)
    device.launch.gate(dtype, ref.SILU, device.put(x), 1, x.shape[1] // 2, y)
    got = ref.exact(device.get(y, (x.shape[1] // 2,), numpy_type(dtype)))
    with np.errstate(over="ignore"):
        wanted = ref.exact(x)[0, ::2] / (1 + np.exp(-ref.exact(x)[0, ::2]))
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=1e-6)
