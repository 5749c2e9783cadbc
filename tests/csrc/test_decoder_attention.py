"""Attention of decoders against float64: shared keys, causal or with windows, head sizes up to 512."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.csrc import reference as ref
from tests.csrc.device import Device, numpy_type
from tests.csrc.test_attention import FIRST_QUERY, LAST_QUERY, run_attention

pytestmark = pytest.mark.gpu

LENGTHS = [*ref.LENGTHS, 300, 1000]


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    window: int = 0
    scale: float = 0.0
    causal: bool = True

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


SHAPES = [
    Shape(16, 8, 128),
    Shape(8, 8, 128),
    Shape(4, 1, 512, scale=0.06, causal=False),
    Shape(4, 1, 128, window=100),
    Shape(3, 1, 256, causal=False),
    Shape(3, 1, 256, window=512, scale=0.07, causal=False),
    Shape(4, 2, 256),
    Shape(3, 1, 256, window=33),
    Shape(14, 2, 64),
    Shape(4, 2, 64, window=20),
    Shape(2, 1, 320, window=33),
    Shape(4, 2, 80, scale=0.2),
    Shape(2, 2, 200),
    Shape(3, 3, 24, window=1, causal=False, scale=0.3),
]


def run(
    device: Device,
    dtype: int,
    qkv: npt.NDArray[np.generic],
    lengths: list[int],
    shape: Shape,
    hopper: bool,
    queries: int = 0,
    **more: Any,
) -> npt.NDArray[np.generic]:
    more |= {"window": shape.window, "scale": shape.scale, "causal": shape.causal}
    return run_attention(device, dtype, qkv, lengths, shape.heads, hopper, queries, kv_heads=shape.kv_heads, **more)


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("hopper", [False, True])
def test_against_float64(device: Device, random: np.random.Generator, dtype: int, shape: Shape, hopper: bool) -> None:
    if hopper and dtype == ref.FLOAT32:
        pytest.skip("always the portable kernel")
    if dtype == ref.FLOAT32 and shape.dim > 256:
        pytest.skip("refused")
    lengths = [int(n) for n in random.permutation(LENGTHS)]
    qkv = ref.drawn(random, (sum(lengths), shape.width), dtype)
    wanted = ref.attention(
        ref.exact(qkv), lengths, shape.heads, window=shape.window, kv_heads=shape.kv_heads, scale=shape.scale,
        causal=shape.causal,
    )  # fmt: skip
    got = run(device, dtype, qkv, lengths, shape, hopper)
    assert ref.error(got, wanted) <= (
        ref.allowed(wanted, dtype) if dtype == ref.FLOAT32 else 1.6 * ref.rounding(wanted, dtype)
    )


@pytest.mark.parametrize("shape", SHAPES[:9], ids=repr)
@pytest.mark.parametrize("hopper", [False, True])
def test_batch_invariance(device: Device, random: np.random.Generator, shape: Shape, hopper: bool) -> None:
    qkv = ref.drawn(random, (sum(LENGTHS), shape.width), ref.BFLOAT16)
    together = run(device, ref.BFLOAT16, qkv, LENGTHS, shape, hopper)
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        single = run(device, ref.BFLOAT16, qkv[rows], [length], shape, hopper)
        assert single.tobytes() == together[rows].tobytes()
        start += length


@pytest.mark.parametrize("shape", SHAPES[:6], ids=repr)
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("queries", [FIRST_QUERY, LAST_QUERY])
def test_one_query_a_sequence(
    device: Device, random: np.random.Generator, queries: int, shape: Shape, hopper: bool
) -> None:
    qkv = ref.drawn(random, (sum(LENGTHS), shape.width), ref.FLOAT16)
    every = run(device, ref.FLOAT16, qkv, LENGTHS, shape, hopper)
    needed = run(device, ref.FLOAT16, qkv, LENGTHS, shape, hopper, queries)
    ends = np.cumsum(LENGTHS)
    rows = ends - 1 if queries == LAST_QUERY else ends - LENGTHS
    assert needed[rows].tobytes() == every[rows].tobytes()
    assert np.isnan(needed).any()  # the others are skipped


@pytest.mark.parametrize("shape", SHAPES[:6], ids=repr)
@pytest.mark.parametrize("hopper", [False, True])
def test_other_texts_infinities_stay_out(
    device: Device, random: np.random.Generator, shape: Shape, hopper: bool
) -> None:
    lengths = [70, 200, 33, 20]
    qkv = ref.drawn(random, (sum(lengths), shape.width), ref.FLOAT16)
    single = run(device, ref.FLOAT16, qkv, lengths, shape, hopper)
    qkv[70:270] = np.where(random.random((200, shape.width)) < 0.5, np.inf, np.nan)
    mixed = run(device, ref.FLOAT16, qkv, lengths, shape, hopper)
    for rows in (slice(0, 70), slice(270, None)):
        assert mixed[rows].tobytes() == single[rows].tobytes()


SHARING = [shape for shape in SHAPES if shape.causal and shape.dim <= 256] + [
    Shape(3, 1, 128),
    Shape(3, 1, 64, window=40),
    Shape(6, 2, 256),
]


@pytest.mark.parametrize("shape", SHARING, ids=repr)
@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("hopper", [False, True])
def test_shared_prefixes_change_no_bits(
    device: Device, random: np.random.Generator, dtype: int, shape: Shape, hopper: bool
) -> None:
    """Several continuations of two texts, which begin with any multiple of 8 of their tokens, next to other texts."""
    if hopper and dtype == ref.FLOAT32:
        pytest.skip("always the portable kernel")
    texts: list[npt.NDArray[np.generic]] = []
    lengths: list[int] = []
    shared: list[tuple[int, int]] = []
    for owner in (300, 20, 33, 1000):
        whole = ref.drawn(random, (owner, shape.width), dtype)
        row = sum(lengths)
        texts.append(whole)
        lengths.append(owner)
        shared.append((0, 0))
        splits = [8, 56, 64, 120, 296, *(8 * random.integers(4, 37, 3))] if owner >= 300 else []
        for tokens, own in zip(splits, (30, 8, 1, 200, 65, 40, 128, 7), strict=False):
            texts.append(np.concatenate([whole[:tokens], ref.drawn(random, (own, shape.width), dtype)]))
            lengths.append(own)
            shared.append((row, int(tokens)))
    apart = run(device, dtype, np.concatenate(texts), [len(text) for text in texts], shape, hopper)
    rows = np.concatenate([text[tokens:] for text, (_, tokens) in zip(texts, shared, strict=True)])
    together = run(device, dtype, rows, lengths, shape, hopper, shared=shared)
    kept = np.concatenate([np.arange(len(text)) >= tokens for text, (_, tokens) in zip(texts, shared, strict=True)])
    assert together.tobytes() == apart[kept].tobytes()
    last = run(device, dtype, rows, lengths, shape, hopper, LAST_QUERY, shared=shared)
    ends = np.cumsum(lengths) - 1
    assert last[ends].tobytes() == together[ends].tobytes()


@pytest.mark.parametrize("dtype", [ref.FLOAT16, ref.BFLOAT16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("step_keys", [16, 32])
def test_wide_heads_in_steps_of_16_and_of_32_keys(
    device: Device, random: np.random.Generator, dtype: int, causal: bool, step_keys: int
) -> None:
    shape = Shape(2, 1, 504, causal=causal)
    qkv = ref.drawn(random, (sum(LENGTHS), shape.width), dtype)
    long, short = ref.tiles(LENGTHS)
    context = device.new(len(qkv) * shape.heads * shape.dim * qkv.itemsize)
    device.launch.wide_attention(
        dtype, device.put(qkv), device.put(long), len(long), device.put(short), len(short), shape.heads,
        shape.kv_heads, shape.dim, causal, 0, context, step_keys,
    )  # fmt: skip
    got = device.get(context, (len(qkv), shape.heads * shape.dim), numpy_type(dtype))
    wanted = ref.attention(ref.exact(qkv), LENGTHS, shape.heads, kv_heads=shape.kv_heads, causal=causal)
    assert ref.error(got, wanted) <= 1.6 * ref.rounding(wanted, dtype)


def test_refused_heads(device: Device) -> None:
    with pytest.raises(RuntimeError, match="multiples of 8 up to 256"):
        device.launch.attention(ref.FLOAT32, 0, 0, 0, 0, 0, 0, 4, 512, 0, causal=True)
    with pytest.raises(RuntimeError, match="3 heads of queries and 2 of keys"):
        device.launch.attention(ref.FLOAT16, 0, 0, 0, 0, 0, 0, 3, 64, 0, kv_heads=2)
    with pytest.raises(RuntimeError, match="relative position"):
        device.launch.attention(ref.FLOAT16, 0, 0, 0, 0, 0, 0, 4, 64, 0, relative=16, reach=64, causal=True)


@pytest.mark.parametrize(
    "shape", [Shape(4, 2, 128), Shape(3, 1, 128), Shape(3, 1, 256, window=512, causal=False)], ids=repr
)
def test_many_steps(device: Device, random: np.random.Generator, shape: Shape) -> None:
    """Every slot of the ring is used 50 times, by two warpgroups that do not wait for each other."""
    qkv = ref.drawn(random, (8100, shape.width), ref.FLOAT16)
    lengths = [8001, 99]
    first = run(device, ref.FLOAT16, qkv, lengths, shape, True)
    portable = run(device, ref.FLOAT16, qkv, lengths, shape, False)
    assert ref.error(first, ref.exact(portable)) <= 1e-3
    for _ in range(10):
        assert run(device, ref.FLOAT16, qkv, lengths, shape, True).tobytes() == first.tobytes()
