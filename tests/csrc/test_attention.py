"""Attention's kernels against float64, and what a text's neighbors may not change.

Plain heads, scores by relative position, windows, and decoders: shared keys, causal, head sizes up to 512.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.csrc import reference as ref
from tests.csrc.device import Device, numpy_type

pytestmark = pytest.mark.gpu

FIRST_QUERY, LAST_QUERY = 1, 2
LENGTHS = [*ref.LENGTHS, 300, 1000]


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    window: int = 0
    scale: float = 0.0
    causal: bool = False
    relative: bool = False

    def __str__(self) -> str:
        more = {"window": self.window, "scale": self.scale, "causal": self.causal, "relative": self.relative}
        return "-".join(map(str, (self.heads, self.kv_heads, self.dim, *(f"{k}{v}" for k, v in more.items() if v))))

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim

    @property
    def is_plain(self) -> bool:
        """True if kernels for Hopper exist for head sizes 32 and 64 only."""
        return self.heads == self.kv_heads and not self.causal and not self.scale and self.dim <= 128


SIZES = [(12, 64), (12, 32), (3, 8), (3, 24), (2, 40), (5, 80), (3, 96), (2, 128)]
PLAIN = [Shape(heads, heads, dim, relative=relative) for heads, dim in SIZES for relative in (False, True)]
WINDOWED = [
    Shape(heads, heads, dim, window)
    for heads, dim in ((12, 64), (12, 32), (2, 24), (2, 96), (1, 128))
    for window in (1, 20, 64, 100)
]
Causal = functools.partial(Shape, causal=True)
DECODERS = [
    Causal(16, 8, 128),
    Causal(8, 8, 128),
    Shape(4, 1, 512, scale=0.06),
    Causal(4, 1, 128, window=100),
    Shape(3, 1, 256),
    Shape(3, 1, 256, window=512, scale=0.07),
    Causal(4, 2, 256),
    Causal(3, 1, 256, window=33),
    Causal(14, 2, 64),
    Causal(4, 2, 64, window=20),
    Causal(2, 1, 320, window=33),
    Causal(4, 2, 80, scale=0.2),
    Causal(2, 2, 200),
    Shape(3, 3, 24, window=1, scale=0.3),
]
SOME = [*PLAIN[:2], Shape(12, 12, 64, window=64), *DECODERS[:6]]


def drawn_relative(random: np.random.Generator, heads: int, longest: int) -> npt.NDArray[np.float32]:
    return (2 * random.standard_normal((heads, 2 * longest - 1))).astype(np.float32)


def run_attention(
    device: Device,
    dtype: int,
    qkv: npt.NDArray[np.generic],
    lengths: list[int],
    heads: int,
    hopper: bool,
    queries: int = 0,
    relative: npt.NDArray[np.float32] | None = None,
    *,
    kv_heads: int = 0,
    shared: list[tuple[int, int]] | None = None,
    **more: Any,
) -> npt.NDArray[np.generic]:
    """The context of rows qkv. `more`: window, scale, causal.

    `shared`: of each text, the row of its prefix and its tokens, which precede `lengths`.
    """
    if hopper and importlib.import_module("embert.engine._cuda").device_info(0)[1] != 90:
        pytest.skip("needs compute capability 9.0")
    long, short = ref.tiles(lengths)
    if shared is not None:
        long, short, prefixes = ref.tiles_of_prefixes(lengths, shared)
        more["prefixes"] = device.put(prefixes)
    dim = qkv.shape[1] // (heads + 2 * (kv_heads or heads))
    context = device.new(len(qkv) * heads * dim * qkv.itemsize)
    table, reach = (None, 0) if relative is None else ref.relative_table(relative, dim)
    device.launch.attention(
        dtype, device.put(qkv), len(qkv), device.put(long), len(long), device.put(short), len(short), heads, dim,
        context, hopper, queries, 0 if table is None else device.put(table), reach, kv_heads=kv_heads, **more,
    )  # fmt: skip
    return device.get(context, (len(qkv), heads * dim), numpy_type(dtype))


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


def scores_of(random: np.random.Generator, shape: Shape) -> npt.NDArray[np.float32] | None:
    return drawn_relative(random, shape.heads, max(LENGTHS)) if shape.relative else None


@pytest.mark.parametrize("shape", [*PLAIN, *WINDOWED, *DECODERS], ids=str)
@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("hopper", [False, True])
def test_against_float64(device: Device, random: np.random.Generator, dtype: int, shape: Shape, hopper: bool) -> None:
    if hopper and (dtype == ref.FLOAT32 or (shape.is_plain and shape.dim not in (32, 64))):
        pytest.skip("always the portable kernel")
    if dtype == ref.FLOAT32 and shape.dim > 256:
        pytest.skip("refused")
    lengths = [int(n) for n in random.permutation(LENGTHS)]
    qkv = ref.drawn(random, (sum(lengths), shape.width), dtype)
    scores = scores_of(random, shape)
    wanted = ref.attention(
        ref.exact(qkv), lengths, shape.heads, None if scores is None else scores.astype(np.float64),
        window=shape.window, kv_heads=shape.kv_heads, scale=shape.scale, causal=shape.causal,
    )  # fmt: skip
    got = run(device, dtype, qkv, lengths, shape, hopper, relative=scores)
    # P is rounded to 16 bits before P·V, as in every fused attention: a second rounding, averaged over the keys.
    assert ref.error(got, wanted) <= (
        ref.allowed(wanted, dtype) if dtype == ref.FLOAT32 else 1.6 * ref.rounding(wanted, dtype)
    )


@pytest.mark.parametrize("shape", [*SOME, *DECODERS[6:9]], ids=str)
@pytest.mark.parametrize("dtype", [ref.BFLOAT16, ref.FLOAT32])
@pytest.mark.parametrize("hopper", [False, True])
def test_batch_invariance(device: Device, random: np.random.Generator, shape: Shape, hopper: bool, dtype: int) -> None:
    if dtype == ref.FLOAT32 and (hopper or shape.dim > 256):
        pytest.skip("always the portable kernel, or refused")
    qkv = ref.drawn(random, (sum(LENGTHS), shape.width), dtype)
    scores = scores_of(random, shape)
    together = run(device, dtype, qkv, LENGTHS, shape, hopper, relative=scores)
    for start, length in zip(np.cumsum([0, *LENGTHS]), LENGTHS, strict=False):
        rows = slice(start, start + length)
        single = run(device, dtype, qkv[rows], [length], shape, hopper, relative=scores)
        assert single.tobytes() == together[rows].tobytes()


@pytest.mark.parametrize("shape", SOME, ids=str)
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("queries", [FIRST_QUERY, LAST_QUERY])
def test_one_query_a_sequence(
    device: Device, random: np.random.Generator, queries: int, shape: Shape, hopper: bool
) -> None:
    qkv = ref.drawn(random, (sum(LENGTHS), shape.width), ref.FLOAT16)
    scores = scores_of(random, shape)
    every = run(device, ref.FLOAT16, qkv, LENGTHS, shape, hopper, relative=scores)
    needed = run(device, ref.FLOAT16, qkv, LENGTHS, shape, hopper, queries, relative=scores)
    ends = np.cumsum(LENGTHS)
    rows = ends - 1 if queries == LAST_QUERY else ends - LENGTHS
    assert needed[rows].tobytes() == every[rows].tobytes()
    assert np.isnan(needed).any()  # the others are skipped


@pytest.mark.parametrize("shape", [Shape(24, 24, 32), *SOME], ids=str)
@pytest.mark.parametrize("hopper", [False, True])
def test_other_texts_infinities_stay_out(
    device: Device, random: np.random.Generator, shape: Shape, hopper: bool
) -> None:
    lengths = [70, 200, 33, 20]
    qkv = ref.drawn(random, (sum(lengths), shape.width), ref.FLOAT16)
    scores = scores_of(random, shape)
    single = run(device, ref.FLOAT16, qkv, lengths, shape, hopper, relative=scores)
    qkv[70:270] = np.where(random.random((200, shape.width)) < 0.5, np.inf, np.nan)
    mixed = run(device, ref.FLOAT16, qkv, lengths, shape, hopper, relative=scores)
    for rows in (slice(0, 70), slice(270, None)):
        assert mixed[rows].tobytes() == single[rows].tobytes()


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
