"""Kernels that decoders need, against float64: RMSNorm, norms of queries and keys, embeddings without a norm."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tests.csrc import reference as ref
from tests.csrc.device import Device, numpy_type
from tests.csrc.test_fused_products import ROWS, TYPES

pytestmark = pytest.mark.gpu

EPSILON = 1e-6


def rmsnorm(x: ref.Doubles, gamma: npt.NDArray[np.float32]) -> ref.Doubles:
    y: ref.Doubles = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + EPSILON) * gamma.astype(np.float64)
    return y


def gammas(random: np.random.Generator, columns: int) -> npt.NDArray[np.float32]:
    return random.uniform(0.2, 1.8, columns).astype(np.float32)


def row_sums(found: npt.NDArray[np.float32]) -> ref.Doubles:
    """Σ and Σ² of rows [rows, groups, 2]."""
    sums: ref.Doubles = found.astype(np.float64).sum(axis=1)
    return sums


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("hidden", [8, 512, 768, 1024, 2560, 4096])
@pytest.mark.parametrize("adds", ["", "adds", "adds to rows with factors", "multiplies"])
def test_rmsnorm(device: Device, random: np.random.Generator, dtype: int, hidden: int, adds: str) -> None:
    if dtype == ref.FLOAT32:
        hidden = min(hidden, 2048)
    rows = 777
    x = ref.stored(ref.with_outliers(random.standard_normal((rows, hidden)) + 0.5, random), dtype)
    y, gamma = ref.drawn(random, x.shape, dtype), gammas(random, hidden)
    wanted = rmsnorm(ref.exact(x), gamma)
    groups = -(-hidden // 128)
    to, sums = device.put(y), device.new(rows * groups * 8)
    if adds == "multiplies":
        wanted = wanted * ref.exact(y)
        device.launch.multiply_rmsnorm(dtype, device.put(x), device.put(gamma), rows, hidden, EPSILON, to)
    elif adds:
        before, after = (random.uniform(1, 2, hidden).astype(np.float32) for _ in range(2))
        if adds == "adds":
            before = after = np.ones(hidden, np.float32)
        wanted = wanted + ref.exact(y) / before
        factors = (0, 0) if adds == "adds" else (device.put(before), device.put(after))
        device.launch.add_rmsnorm(dtype, device.put(x), device.put(gamma), rows, hidden, EPSILON, to, *factors, sums)
        found = row_sums(device.get(sums, (rows, groups, 2), np.float32))
        np.testing.assert_allclose(found[:, 1], np.square(wanted).sum(axis=1), rtol=1e-5)
        np.testing.assert_allclose(found[:, 0], wanted.sum(axis=1), atol=1e-5 * np.abs(wanted).sum(axis=1).max())
        wanted = wanted * after
    else:
        device.launch.rmsnorm(dtype, device.put(x), device.put(gamma), rows, hidden, EPSILON, to)
    assert ref.error(device.get(to, x.shape, numpy_type(dtype)), wanted) <= ref.allowed(wanted, dtype)


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotary_dim"),
    [
        (16, 8, 128, 128),
        (3, 1, 256, 256),
        (4, 1, 512, 512),
        (4, 2, 64, 64),
        (4, 1, 80, 40),
        (2, 2, 32, 0),
        (5, 1, 24, 24),
    ],
)
@pytest.mark.parametrize("rows", [1, 1000])
@pytest.mark.parametrize("norms_values", [False, True])
def test_norms_of_queries_and_keys(
    device: Device, random: np.random.Generator, dtype: int, heads: int, kv_heads: int, size: int, rotary_dim: int,
    rows: int, norms_values: bool,
) -> None:  # fmt: skip
    pitch, columns = (heads + 2 * kv_heads) * size, (heads + kv_heads) * size
    qkv = ref.drawn(random, (rows, pitch), dtype, 2.0)
    angles = random.uniform(-np.pi, np.pi, (512, max(rotary_dim // 2, 1)))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    positions = random.integers(0, 512, rows).astype(np.int32)
    query, key = gammas(random, size), gammas(random, size)
    address = device.put(qkv)
    device.launch.qk_norm(
        dtype, address, rows, pitch, device.put(query), device.put(key), heads, EPSILON, size, rotary_dim, columns,
        device.put(table), device.put(positions), kv_heads if norms_values else 0,
    )  # fmt: skip
    got = device.get(address, qkv.shape, numpy_type(dtype))
    parts = ref.exact(qkv)[:, :columns].reshape(rows, heads + kv_heads, size)
    parts = np.concatenate([rmsnorm(parts[:, :heads], query), rmsnorm(parts[:, heads:], key)], axis=1)
    if rotary_dim:
        by = table[positions].astype(np.float64)[:, None]
        pairs = parts[..., :rotary_dim].reshape(rows, heads + kv_heads, rotary_dim // 2, 2)
        a, b, cos, sin = pairs[..., 0], pairs[..., 1], by[..., 0], by[..., 1]
        parts[..., :rotary_dim] = np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(
            rows, heads + kv_heads, rotary_dim
        )
    wanted = parts.reshape(rows, columns)
    assert ref.error(got[:, :columns], wanted) <= ref.allowed(wanted, dtype)
    if norms_values:
        values = ref.exact(qkv)[:, columns:].reshape(rows, kv_heads, size)
        wanted = rmsnorm(values, np.ones(size, np.float32)).reshape(rows, -1)
        assert ref.error(got[:, columns:], wanted) <= ref.allowed(wanted, dtype)
    else:
        assert got[:, columns:].tobytes() == qkv[:, columns:].tobytes()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("width", "out", "gated"), [(1024, 4096, False), (768, 1280, False), (1024, 3072, True)])
def test_an_rmsnorm_folded_into_a_product(
    device: Device, random: np.random.Generator, dtype: int, width: int, out: int, gated: bool
) -> None:
    """Rows far from 0 on average, for which a LayerNorm would be something else; the same bits in every tile."""
    w_rows = 2 * out if gated else out
    weight = ref.stored(random.standard_normal((w_rows, width)) / np.sqrt(width), dtype)
    gamma, zeros = gammas(random, width), np.zeros(w_rows, np.float32)
    product = device.launch.product(
        "hopper", "", dtype, device.put(weight), device.put(zeros), out, width, ref.SILU if gated else ref.NONE,
        gamma=device.put(gamma), beta=device.put(np.zeros(width, np.float32)), epsilon=EPSILON, gated=gated,
        exact=device.put(ref.exact(weight).astype(np.float32)), rms=True,
    )  # fmt: skip

    def multiplied(rows: ref.Doubles) -> ref.Doubles:
        y: ref.Doubles = rows @ ref.exact(weight).T
        return ref.activation(y[:, ::2], ref.SILU) * y[:, 1::2] if gated else y

    x = ref.stored(3 * random.standard_normal((3001, width)) + 2, dtype)
    exact = ref.exact(x)
    sums = device.put(ref.group_sums(exact).astype(np.float32))
    wanted = multiplied(rmsnorm(exact, gamma))
    allowed = ref.error(ref.stored(multiplied(ref.exact(ref.stored(rmsnorm(exact, gamma), dtype))), dtype), wanted)
    together: npt.NDArray[np.generic] | None = None
    for rows in sorted(ROWS, reverse=True):
        y = device.new(rows * out * x.itemsize)
        product.run(device.launch, device.put(x[:rows]), 0, rows, y, sums)
        got = device.get(y, (rows, out), numpy_type(dtype))
        together = got if together is None else together
        assert got.tobytes() == together[:rows].tobytes(), rows
        assert ref.error(got, wanted[:rows]) <= 1.6 * allowed, rows
