"""Kernels that encoders newer than BERT need, against float64: RoPE columns, gates, windows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tests.csrc import reference as ref
from tests.csrc.device import Device, numpy_type
from tests.csrc.test_attention import FIRST_QUERY, LAST_QUERY, run_attention

pytestmark = pytest.mark.gpu

LENGTHS = [*ref.LENGTHS, 1000]


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


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(12, 64), (12, 32), (2, 24), (2, 96), (1, 128)])
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("window", [1, 20, 64, 100])
def test_attention_with_a_window(
    device: Device, random: np.random.Generator, dtype: int, heads: int, dim: int, hopper: bool, window: int
) -> None:
    if hopper and (dim not in (32, 64) or dtype == ref.FLOAT32):
        pytest.skip("always the portable kernel")
    lengths = [int(n) for n in random.permutation(LENGTHS)]
    qkv = ref.drawn(random, (sum(lengths), 3 * heads * dim), dtype)
    wanted = ref.attention(ref.exact(qkv), lengths, heads, window=window)
    got = run_attention(device, dtype, qkv, lengths, heads, hopper, window=window)
    assert ref.error(got, wanted) <= (
        ref.allowed(wanted, dtype) if dtype == ref.FLOAT32 else 1.6 * ref.rounding(wanted, dtype)
    )


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("window", [3, 64, 65])
def test_a_window_hides_all_that_is_outside(
    device: Device, random: np.random.Generator, window: int, hopper: bool
) -> None:
    """Scores outside are huge: if one key too many were seen, nothing else would count."""
    length, heads, query = 700, 2, 350
    qkv = ref.drawn(random, (length, 3, heads, 64), ref.FLOAT16)
    inside = slice(query - window, query + window + 1)
    qkv[:, 1] = qkv[query, 0] * np.float16(8)  # keys that are all like the query
    qkv[inside, 1] = 0
    got = run_attention(device, ref.FLOAT16, qkv.reshape(length, -1), [length], heads, hopper, window=window)
    wanted = ref.exact(qkv)[inside, 2].mean(axis=0).reshape(-1)
    np.testing.assert_allclose(got[query].astype(np.float64), wanted, atol=2e-3)


@pytest.mark.parametrize("dtype", [ref.FLOAT16, ref.FLOAT32])
@pytest.mark.parametrize("hopper", [False, True])
def test_a_window_is_batch_invariant(device: Device, random: np.random.Generator, hopper: bool, dtype: int) -> None:
    qkv = ref.drawn(random, (sum(LENGTHS), 3 * 768), dtype)
    together = run_attention(device, dtype, qkv, LENGTHS, 12, hopper, window=64)
    for start, length in zip(np.cumsum([0, *LENGTHS]), LENGTHS, strict=False):
        single = run_attention(device, dtype, qkv[start : start + length], [length], 12, hopper, window=64)
        assert single.tobytes() == together[start : start + length].tobytes()


@pytest.mark.parametrize("queries", [FIRST_QUERY, LAST_QUERY])
@pytest.mark.parametrize("hopper", [False, True])
def test_a_window_of_one_query_a_sequence(
    device: Device, random: np.random.Generator, queries: int, hopper: bool
) -> None:
    qkv = ref.drawn(random, (sum(LENGTHS), 3 * 768), ref.FLOAT16)
    everyone = run_attention(device, ref.FLOAT16, qkv, LENGTHS, 12, hopper, window=64)
    found = run_attention(device, ref.FLOAT16, qkv, LENGTHS, 12, hopper, queries, window=64)
    ends = np.cumsum(LENGTHS)
    rows = ends - 1 if queries == LAST_QUERY else ends - LENGTHS
    assert found[rows].tobytes() == everyone[rows].tobytes()


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("alibi", [False, True])
def test_a_text_of_8192_tokens(device: Device, random: np.random.Generator, hopper: bool, alibi: bool) -> None:
    """Some of its queries, against float64."""
    length, heads, dim = 8192, 2, 64
    qkv = ref.drawn(random, (length, 3 * heads * dim), ref.FLOAT16)
    relative: npt.NDArray[np.float32] | None = None
    if alibi:
        distances = np.abs(np.arange(1 - length, length, dtype=np.float64))
        relative = (-np.array([[0.0625], [0.00390625]]) * distances).astype(np.float32)
    got = run_attention(device, ref.FLOAT16, qkv, [length], heads, hopper, relative=relative)
    q, k, v = ref.exact(qkv).reshape(length, 3, heads, dim).transpose(1, 2, 0, 3)
    rows = np.array([0, 1, 63, 64, 4095, 4096, 8191])
    scores = q[:, rows] @ k.transpose(0, 2, 1) / np.sqrt(dim)
    if relative is not None:
        scores += relative[:, np.arange(length) - rows[:, None] + length - 1]
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    wanted = (weights / weights.sum(axis=2, keepdims=True) @ v).transpose(1, 0, 2).reshape(len(rows), -1)
    assert ref.error(got[rows], wanted) <= 2.5 * ref.rounding(wanted, ref.FLOAT16)
