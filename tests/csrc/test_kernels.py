"""Every kernel but attention and the matrix products against float64.

Outputs start as NaN, with guards behind them; awkward lengths, outlier channels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tests.csrc import reference as ref
from tests.csrc.device import Device, numpy_type

pytestmark = pytest.mark.gpu

EPSILON = 1e-12


def vector(random: np.random.Generator, columns: int) -> npt.NDArray[np.float32]:
    """A vector of a model: FP32 whatever the rows are."""
    return random.standard_normal(columns).astype(np.float32)


@pytest.mark.parametrize("lengths", [[], [1], ref.LENGTHS, [3] * 1000, [33] * 70 + [1] * 70, [512] * 33])
@pytest.mark.parametrize("spare", [0, 37])
def test_offsets(device: Device, random: np.random.Generator, lengths: list[int], spare: int) -> None:
    tokens, sequences = sum(lengths), len(lengths)
    long, short = ref.tiles(lengths)
    ids = random.integers(0, 30000, tokens).astype(np.int32)
    types = random.integers(0, 2, tokens).astype(np.int32)
    cuts = random.integers(0, 2**32, sequences, dtype=np.uint32)
    rows, slots = tokens + spare, sequences + spare
    out = {
        "ids": (device.new(4 * rows), rows),
        "types": (device.new(4 * rows), rows),
        "positions": (device.new(4 * rows), rows),
        "cuts": (device.new(4 * slots), sequences),
        "cu_seqlens": (device.new(4 * (slots + 1)), slots + 1),
        "tiles": (device.new(16 * (len(long) + spare)), 4 * (len(long) + spare)),
        "shorts": (device.new(16 * (len(short) + spare)), 4 * (len(short) + spare)),
    }
    inputs = [np.array([sequences, tokens], np.int32), np.array(lengths, np.int32), ids, types, cuts]
    device.launch.offsets(
        *[device.put(array) for array in inputs],
        *[address for address, _ in out.values()],
        rows, slots, len(long) + spare, len(short) + spare,
    )  # fmt: skip
    got = {name: device.get(address, (count,), np.int32) for name, (address, count) in out.items()}
    positions = np.concatenate([np.arange(n) for n in lengths] + [np.zeros(spare)])
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths), np.full(spare, tokens)])
    assert (got["ids"] == np.pad(ids, (0, spare))).all()
    assert (got["types"] == np.pad(types, (0, spare))).all()
    assert (got["positions"] == positions).all()
    assert (got["cuts"].view(np.uint32) == cuts).all()
    assert (got["cu_seqlens"] == cu_seqlens[: slots + 1]).all()
    assert (got["tiles"].reshape(-1, 4) == np.pad(long, ((0, spare), (0, 0)))).all()
    assert (got["shorts"].reshape(-1, 4) == np.pad(short, ((0, spare), (0, 0)))).all()


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("hidden", [8, 312, 384, 768, 1024])
@pytest.mark.parametrize("rows", [0, 1, 777])
def test_layernorm(device: Device, random: np.random.Generator, dtype: int, hidden: int, rows: int) -> None:
    x = ref.stored(ref.with_outliers(random.standard_normal((rows, hidden)) + 0.5, random), dtype)
    gamma, beta = vector(random, hidden), vector(random, hidden)
    wanted = ref.layernorm(ref.exact(x), ref.exact(gamma), ref.exact(beta), EPSILON)
    y = device.new(x.nbytes)
    device.launch.layernorm(dtype, device.put(x), device.put(gamma), device.put(beta), rows, hidden, EPSILON, y)
    got = device.get(y, x.shape, numpy_type(dtype))
    assert rows == 0 or ref.error(got, wanted) <= ref.allowed(wanted, dtype)


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("hidden", [384, 768])
@pytest.mark.parametrize("has_types", [True, False])
@pytest.mark.parametrize("leaves", ["LayerNorm", "sum", "gamma times sum"])
def test_embedding(
    device: Device, random: np.random.Generator, dtype: int, hidden: int, has_types: bool, leaves: str
) -> None:
    rows = 333
    word, place, kind = (ref.drawn(random, (n, hidden), dtype, 0.05) for n in (500, 64, 2))
    gamma, beta = vector(random, hidden), vector(random, hidden)
    ids, positions, types = (random.integers(0, n, rows).astype(np.int32) for n in (500, 64, 2))
    total = ref.exact(word)[ids] + ref.exact(place)[positions] + (ref.exact(kind)[types] if has_types else 0)
    normed = ref.layernorm(total, ref.exact(gamma), ref.exact(beta), EPSILON)
    wanted = {"LayerNorm": normed, "sum": total, "gamma times sum": total * ref.exact(gamma)}[leaves]
    y = device.new(rows * word[0].nbytes)
    groups = hidden // 128
    sums = device.new(rows * groups * 8)
    device.launch.embed(
        dtype, device.put(word), device.put(place), device.put(kind) if has_types else 0,
        device.put(gamma), device.put(beta),
        device.put(ids), device.put(types), device.put(positions), rows, hidden, EPSILON, y,
        0 if leaves == "LayerNorm" else sums, leaves == "gamma times sum",
    )  # fmt: skip
    assert ref.error(device.get(y, (rows, hidden), numpy_type(dtype)), wanted) <= ref.allowed(wanted, dtype)
    if leaves != "LayerNorm":
        got = device.get(sums, (rows, groups, 2), np.float32).sum(axis=1)
        np.testing.assert_allclose(
            got, np.stack([total.sum(axis=1), (total**2).sum(axis=1)], axis=1), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("kind", [ref.CLS, ref.LAST])
@pytest.mark.parametrize(("hidden", "parts"), [(768, 1), (312, 4), (1024, 2), (384, 0)])
def test_gather(device: Device, random: np.random.Generator, dtype: int, kind: int, hidden: int, parts: int) -> None:
    tokens, empty = sum(ref.LENGTHS), 3  # places for sequences that a batch does not have
    wider = hidden + 64
    context, x = ref.drawn(random, (tokens, wider), dtype), ref.drawn(random, (tokens, hidden), dtype)
    sums = random.standard_normal((tokens, -(-hidden // 128) * parts, 2)).astype(np.float32)
    ends = np.cumsum(ref.LENGTHS)
    cu_seqlens = np.concatenate([[0], ends, [tokens] * empty]).astype(np.int32)
    places = [device.new((len(ref.LENGTHS) + empty) * array[0].nbytes) for array in (context, x, sums)]
    device.launch.gather(
        dtype, device.put(context), wider, device.put(x), device.put(sums) if parts else 0, parts,
        device.put(cu_seqlens), kind, len(ref.LENGTHS) + empty, hidden, *places,
    )  # fmt: skip
    rows = ends - 1 if kind == ref.LAST else ends - ref.LENGTHS
    for place, array in zip(places, (context, x, sums), strict=True):
        got = device.get(place, (len(ref.LENGTHS), *array.shape[1:]), array.dtype.type)
        assert got.tobytes() == array[rows].tobytes()


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("kind", [ref.CLS, ref.MEAN, ref.MAX, ref.LAST])
@pytest.mark.parametrize("hidden", [312, 384, 1024])
def test_pool(device: Device, random: np.random.Generator, dtype: int, kind: int, hidden: int) -> None:
    lengths = ref.LENGTHS
    cuts = [0, 1, 5, hidden, ref.KEEPS_LENGTH, ref.KEEPS_LENGTH | 7] * 3
    states = ref.drawn(random, (sum(lengths), hidden), dtype)
    wanted = ref.pool(ref.exact(states), lengths, kind, cuts)
    vectors = device.new(len(lengths) * hidden * 4)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    device.launch.pool(
        dtype,
        kind,
        device.put(states),
        device.put(cu_seqlens),
        device.put(np.array(cuts, np.uint32)),
        len(lengths),
        hidden,
        vectors,
    )
    assert ref.error(device.get(vectors, wanted.shape, np.float32), wanted) <= 1e-6


@pytest.mark.parametrize(
    ("dtype", "hidden"),
    [
        (dtype, hidden)
        for dtype in ref.DTYPES
        for hidden in (312, 384, 1024, 2048)
        if (dtype, hidden) != (ref.FLOAT32, 2048)
    ],
)
@pytest.mark.parametrize("kind", [ref.MEAN, ref.MAX])
def test_pooling_is_batch_invariant(
    device: Device, random: np.random.Generator, dtype: int, kind: int, hidden: int
) -> None:
    lengths = [1, 512, 31, 33, 300, 257, 3000, 64, 700]
    states = device.put(ref.drawn(random, (sum(lengths), hidden), dtype))
    sums = device.put(random.random((sum(lengths), -(-hidden // 128), 2)).astype(np.float32) * 100)
    gamma, beta = (device.put(vector(random, hidden)) for _ in range(2))
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    cuts = device.put(np.zeros(len(lengths), np.uint32))
    norm = (sums, 1, gamma, beta, EPSILON) if hidden <= 1024 else ()

    def pooled(first: int, count: int) -> npt.NDArray[np.float32]:
        vectors = device.new(count * hidden * 4)
        places = device.put(cu_seqlens[first : first + count + 1])
        device.launch.pool(dtype, kind, states, places, cuts, count, hidden, vectors, *norm)
        return device.get(vectors, (count, hidden), np.float32)

    together = pooled(0, len(lengths))
    assert np.isfinite(together).all()
    for i in range(len(lengths)):
        assert pooled(i, 1).tobytes() == together[i].tobytes()
