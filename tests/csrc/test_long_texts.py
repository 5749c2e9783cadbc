"""Attention in tiles of 128 queries: the bits of tiles of 64, whatever shares the batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tests.csrc import reference as ref
from tests.csrc.device import Device
from tests.csrc.test_attention import FIRST_QUERY, LAST_QUERY, run_attention

pytestmark = pytest.mark.gpu

LONG = 1 << 20  # as `longest`: tiles of 128
HEADS, DIM = 3, 64
LENGTHS = [2081, 1, 33, 64, 65, 128, 32, 129, 191, 192, 193, 1000, 2048]


def run(
    device: Device, dtype: int, qkv: npt.NDArray[np.generic], lengths: list[int], longest: int, queries: int = 0
) -> npt.NDArray[np.generic]:
    return run_attention(device, dtype, qkv, lengths, HEADS, True, queries, longest=longest)


@pytest.mark.parametrize("dtype", [ref.FLOAT16, ref.BFLOAT16])
def test_tiles_of_128_have_the_bits_of_64(device: Device, random: np.random.Generator, dtype: int) -> None:
    lengths = [int(n) for n in random.permutation(LENGTHS)]
    qkv = ref.drawn(random, (sum(lengths), 3 * HEADS * DIM), dtype)
    long, plain = (run(device, dtype, qkv, lengths, longest) for longest in (LONG, 0))
    assert long.tobytes() == plain.tobytes()
    wanted = ref.attention(ref.exact(qkv), lengths, HEADS)
    assert ref.error(long, wanted) <= 1.6 * ref.rounding(wanted, dtype)


@pytest.mark.parametrize("queries", [FIRST_QUERY, LAST_QUERY])
def test_one_query_a_sequence(device: Device, random: np.random.Generator, queries: int) -> None:
    qkv = ref.drawn(random, (sum(LENGTHS), 3 * HEADS * DIM), ref.FLOAT16)
    everyone = run(device, ref.FLOAT16, qkv, LENGTHS, LONG)
    found = run(device, ref.FLOAT16, qkv, LENGTHS, LONG, queries)
    ends = np.cumsum(LENGTHS)
    rows = ends - 1 if queries == LAST_QUERY else ends - LENGTHS
    assert found[rows].tobytes() == everyone[rows].tobytes()


def test_other_texts_infinities_stay_out(device: Device, random: np.random.Generator) -> None:
    lengths = [1100, 200, 1033]
    qkv = ref.drawn(random, (sum(lengths), 3 * HEADS * DIM), ref.FLOAT16)
    single = run(device, ref.FLOAT16, qkv, lengths, LONG)
    qkv[1100:1300] = np.where(random.random((200, 3 * HEADS * DIM)) < 0.5, np.inf, np.nan)
    mixed = run(device, ref.FLOAT16, qkv, lengths, LONG)
    for rows in (slice(0, 1100), slice(1300, None)):
        assert mixed[rows].tobytes() == single[rows].tobytes()


def test_many_steps_of_one_text(device: Device, random: np.random.Generator) -> None:
    """Every stage of the ring is used 32 times, by two warpgroups that do not wait for each other."""
    qkv = ref.drawn(random, (8192, 3 * HEADS * DIM), ref.FLOAT16)
    plain = run(device, ref.FLOAT16, qkv, [8192], 0)
    for _ in range(20):
        assert run(device, ref.FLOAT16, qkv, [8192], LONG).tobytes() == plain.tobytes()
