"""Both attention kernels against float64, and what a text's neighbors may not change."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.csrc import reference as ref
from tests.csrc.device import Device, numpy_type

pytestmark = pytest.mark.gpu

FIRST_QUERY, LAST_QUERY = 1, 2


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(12, 64), (12, 32), (3, 8), (3, 24), (2, 40), (5, 80), (3, 96), (2, 128)])
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("relative", [False, True])
def test_attention(
    device: Device, random: np.random.Generator, dtype: int, heads: int, dim: int, hopper: bool, relative: bool
) -> None:
    if hopper and (dim not in (32, 64) or dtype == ref.FLOAT32):
        pytest.skip("always the portable kernel")
    lengths = [int(n) for n in random.permutation(ref.LENGTHS)]
    qkv = ref.drawn(random, (sum(lengths), 3 * heads * dim), dtype)
    nearness = drawn_relative(random, heads, 512) if relative else None
    wanted = ref.attention(ref.exact(qkv), lengths, heads, None if nearness is None else nearness.astype(np.float64))
    got = run_attention(device, dtype, qkv, lengths, heads, hopper, relative=nearness)
    # P is rounded to 16 bits before P·V, as in every fused attention: a second rounding, averaged over the keys.
    assert ref.error(got, wanted) <= (
        ref.allowed(wanted, dtype) if dtype == ref.FLOAT32 else 1.6 * ref.rounding(wanted, dtype)
    )


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


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("heads", [12, 24])
def test_attention_keeps_other_texts_infinities_out(
    device: Device, random: np.random.Generator, heads: int, hopper: bool
) -> None:
    lengths = [70, 200, 33]
    qkv = ref.drawn(random, (303, 3 * 768), ref.FLOAT16)
    single = run_attention(device, ref.FLOAT16, qkv, lengths, heads, hopper)
    qkv[70:270] = np.where(random.random((200, 3 * 768)) < 0.5, np.inf, np.nan)
    mixed = run_attention(device, ref.FLOAT16, qkv, lengths, heads, hopper)
    for rows in (slice(0, 70), slice(270, 303)):
        assert (mixed[rows].view(np.uint16) == single[rows].view(np.uint16)).all()


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("longest", [32, 33, 300])
def test_relative_scores_past_the_longest_text_do_not_count(
    device: Device, random: np.random.Generator, dtype: int, hopper: bool, longest: int
) -> None:
    """Steps go on to whole tiles, over what the table has no scores for."""
    if hopper and dtype == ref.FLOAT32:
        pytest.skip("always the portable kernel")
    lengths = [longest, 1, longest - 1, longest, 20]
    qkv = ref.drawn(random, (sum(lengths), 3 * 768), dtype)
    relative = drawn_relative(random, 12, longest)
    got = run_attention(device, dtype, qkv, lengths, 12, hopper, relative=relative)
    wanted = ref.attention(ref.exact(qkv), lengths, 12, relative.astype(np.float64))
    assert ref.error(got, wanted) <= (1e-6 if dtype == ref.FLOAT32 else 1.6 * ref.rounding(wanted, dtype))


@pytest.mark.parametrize("hopper", [False, True])
def test_attention_to_the_nearest_only(device: Device, hopper: bool) -> None:
    """Scores that leave one key a query: an index that is off by one would show."""
    lengths, heads = ref.LENGTHS, 12
    qkv = np.zeros((sum(lengths), 3, heads, 64), np.float16)
    qkv[:, 2] = (np.arange(sum(lengths)) % 2048)[:, None, None]
    relative = np.zeros((heads, 1023), np.float32)
    wanted = np.empty((sum(lengths), heads, 64))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for head in range(heads):
        distance = head * 5 - 27
        relative[head, 511 + distance] = 100
        for start, length in zip(starts, lengths, strict=False):
            rows = np.arange(start, start + length)
            chosen = rows + distance
            inside = (chosen >= start) & (chosen < start + length)
            mean = qkv[start : start + length, 2, head].astype(np.float64).mean(axis=0)
            wanted[rows, head] = np.where(inside[:, None], (chosen % 2048)[:, None], mean)
    got = run_attention(device, ref.FLOAT16, qkv.reshape(len(qkv), -1), lengths, heads, hopper, relative=relative)
    np.testing.assert_allclose(got.reshape(wanted.shape).astype(np.float64), wanted, rtol=2e-3)


@pytest.mark.parametrize("hopper", [False, True])
def test_attention_with_outliers(device: Device, random: np.random.Generator, hopper: bool) -> None:
    lengths = [5, 100, 300]
    qkv = ref.stored(ref.with_outliers(random.standard_normal((405, 3 * 768)), random), ref.FLOAT16)
    wanted = ref.attention(ref.exact(qkv), lengths, 12)
    assert ref.error(run_attention(device, ref.FLOAT16, qkv, lengths, 12, hopper), wanted) <= 1.6 * ref.rounding(
        wanted, ref.FLOAT16
    )


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("relative", [False, True])
def test_attention_is_batch_invariant(
    device: Device, random: np.random.Generator, hopper: bool, relative: bool
) -> None:
    lengths = ref.LENGTHS
    qkv = ref.drawn(random, (sum(lengths), 3 * 768), ref.FLOAT16)
    nearness = drawn_relative(random, 12, 512) if relative else None
    together = run_attention(device, ref.FLOAT16, qkv, lengths, 12, hopper, relative=nearness)
    start = 0
    for length in lengths:
        rows = qkv[start : start + length]
        single = run_attention(device, ref.FLOAT16, rows, [length], 12, hopper, relative=nearness)
        assert (single.view(np.uint16) == together[start : start + length].view(np.uint16)).all()
        start += length


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("queries", [FIRST_QUERY, LAST_QUERY])
@pytest.mark.parametrize("relative", [False, True])
def test_attention_of_one_query_a_sequence(
    device: Device, random: np.random.Generator, queries: int, hopper: bool, relative: bool
) -> None:
    qkv = ref.drawn(random, (sum(ref.LENGTHS), 3 * 768), ref.FLOAT16)
    nearness = drawn_relative(random, 12, 512) if relative else None
    everyone = run_attention(device, ref.FLOAT16, qkv, ref.LENGTHS, 12, hopper, relative=nearness)
    found = run_attention(device, ref.FLOAT16, qkv, ref.LENGTHS, 12, hopper, queries, nearness)
    ends = np.cumsum(ref.LENGTHS)
    rows = ends - 1 if queries == LAST_QUERY else ends - ref.LENGTHS
    assert (found[rows].view(np.uint16) == everyone[rows].view(np.uint16)).all()
    assert np.isnan(found).any()  # it did spare the others
