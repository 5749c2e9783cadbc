"""DeBERTa's attention against float64, with one part of the scores by distance or both, and with other texts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from embert.engine.encoders.positions import relative_rows
from embert.engine.models.encoder_config import Disentangled
from tests.csrc import reference as ref
from tests.csrc.device import Device, numpy_type

pytestmark = pytest.mark.gpu

HALVES = [ref.FLOAT16, ref.BFLOAT16]
LONGEST = 1000
LENGTHS = [*ref.LENGTHS, 300, LONGEST]
BUCKETS = Disentangled(256, 512, True, True, True, True)


def row_of(relative: Disentangled, longest: int) -> npt.NDArray[np.int16]:
    """By query - key + longest - 1: int16 [2 · longest - 1]."""
    return relative_rows(relative, longest)[::-1].astype(np.int16)


def run(
    device: Device,
    dtype: int,
    qkv: npt.NDArray[np.generic],
    lengths: list[int],
    heads: int,
    tables: list[npt.NDArray[np.generic] | None],
    rows: npt.NDArray[np.int16],
) -> npt.NDArray[np.generic]:
    long, short = ref.tiles(lengths)
    hidden = qkv.shape[1] // 3
    dim = hidden // heads
    scale = (dim * (1 + sum(table is not None for table in tables))) ** -0.5
    context = device.new(qkv.nbytes // 3)
    keys, queries = (0 if table is None else device.put(table) for table in tables)
    device.launch.disentangled_attention(
        dtype, device.put(qkv), device.put(long), len(long), device.put(short), len(short), heads, dim, scale,
        keys, queries, device.put(rows), len(rows) // 2 + 1, context,
    )  # fmt: skip
    return device.get(context, (len(qkv), hidden), numpy_type(dtype))


def expected(
    qkv: ref.Doubles, lengths: list[int], heads: int, tables: list[ref.Doubles | None], rows: npt.NDArray[np.int16]
) -> ref.Doubles:
    hidden = qkv.shape[1] // 3
    dim, longest = hidden // heads, len(rows) // 2 + 1
    scale = (dim * (1 + sum(table is not None for table in tables))) ** -0.5
    keys_by_head, queries_by_head = (
        None if table is None else table.reshape(len(table), heads, dim).transpose(1, 2, 0) for table in tables
    )
    out, start = np.empty((len(qkv), hidden)), 0
    for length in lengths:
        q, k, v = qkv[start : start + length].reshape(length, 3, heads, dim).transpose(1, 2, 0, 3)
        positions = np.arange(length)
        index = rows[positions[:, None] - positions + longest - 1].astype(np.int64)[None]
        scores = q @ k.swapaxes(1, 2)
        if keys_by_head is not None:
            scores += np.take_along_axis(q @ keys_by_head, index, 2)
        if queries_by_head is not None:
            scores += np.take_along_axis(k @ queries_by_head, index.swapaxes(1, 2), 2).swapaxes(1, 2)
        scores *= scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[start : start + length] = (weights @ v).transpose(1, 0, 2).reshape(length, hidden)
        start += length
    return out


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("heads", "dim"), [(12, 64), (6, 32), (3, 24), (2, 128), (2, 80)])
@pytest.mark.parametrize("parts", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("relative", [BUCKETS, Disentangled(16, 128, True, True, True, True),
                                      Disentangled(0, 100, True, True, True, True)])  # fmt: skip
def test_against_float64(
    device: Device,
    random: np.random.Generator,
    dtype: int,
    heads: int,
    dim: int,
    parts: tuple[bool, bool],
    relative: Disentangled,
) -> None:
    lengths = [int(n) for n in random.permutation(LENGTHS)]
    qkv = ref.drawn(random, (sum(lengths), 3 * heads * dim), dtype)
    tables = [ref.drawn(random, (2 * relative.span, heads * dim), dtype) if part else None for part in parts]
    rows = row_of(relative, LONGEST)
    exact = [None if table is None else ref.exact(table) for table in tables]
    wanted = expected(ref.exact(qkv), lengths, heads, exact, rows)
    got = run(device, dtype, qkv, lengths, heads, tables, rows)
    assert ref.error(got, wanted) <= 1.6 * ref.rounding(wanted, dtype)


def test_bits_do_not_depend_on_the_batch(device: Device, random: np.random.Generator) -> None:
    """Nor does what other texts hold: their infinities stay out."""
    lengths, heads = [70, 200, 33, 5, 512, 32], 12
    qkv = ref.drawn(random, (sum(lengths), 3 * 768), ref.FLOAT16)
    tables = [ref.drawn(random, (512, 768), ref.FLOAT16) for _ in range(2)]
    rows = row_of(BUCKETS, 512)
    whole = run(device, ref.FLOAT16, qkv, lengths, heads, [*tables], rows)
    starts = np.cumsum([0, *lengths])
    for number, length in enumerate(lengths):
        own = slice(starts[number], starts[number + 1])
        single = run(device, ref.FLOAT16, qkv[own], [length], heads, [*tables], rows)
        np.testing.assert_array_equal(single.view(np.uint16), whole[own].view(np.uint16))
    spoiled = qkv.copy()
    spoiled[70:270] = np.where(random.random((200, 3 * 768)) < 0.5, np.inf, np.nan)
    mixed = run(device, ref.FLOAT16, spoiled, lengths, heads, [*tables], rows)
    for own in (slice(0, 70), slice(270, sum(lengths))):
        np.testing.assert_array_equal(mixed[own].view(np.uint16), whole[own].view(np.uint16))
