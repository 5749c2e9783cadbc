"""The heads' kernels against float64: outputs start as NaN, with guards behind them; batch-invariant."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from tests.csrc import reference as ref
from tests.csrc.device import Device
from tests.csrc.test_gemm import Weights

pytestmark = pytest.mark.gpu

EPSILON = 1e-12
Floats = npt.NDArray[np.float32]
# heads/tasks.h's HeadActivation
ACTIVATIONS: list[Callable[[ref.Doubles], ref.Doubles]] = [
    lambda x: x,
    np.tanh,
    lambda x: np.maximum(x, 0),
    lambda x: 1 / (1 + np.exp(-x)),
    lambda x: ref.activation(x, ref.GELU),
    lambda x: ref.activation(x, ref.GELU_TANH),
]
IDENTITY, TANH, RELU = range(3)


def pitch_of(columns: int) -> int:
    return -(-columns // 4) * 4


def padded(x: npt.NDArray[np.floating]) -> Floats:
    """Rows as dense.cu reads them: zeros up to their pitch."""
    return np.pad(x.astype(np.float32), ((0, 0), (0, pitch_of(x.shape[1]) - x.shape[1])))


class Layer:
    """A linear layer on the device."""

    def __init__(self, device: Device, random: np.random.Generator, width: int, out: int, activation: int) -> None:
        self.weight = (random.standard_normal((out, width)) / np.sqrt(width)).astype(np.float32)
        self.bias = random.standard_normal(out).astype(np.float32)
        self.device, self.width, self.out, self.activation = device, width, out, activation
        self._at = device.put(padded(self.weight)), device.put(self.bias)

    def run(self, x: Floats, pitch: int = 0) -> Floats:
        """x [rows, width] → [rows, pitch], or [rows, out]."""
        shape = (len(x), pitch or self.out)
        y = self.device.new(int(np.prod(shape)) * 4)
        self.device.launch.dense(
            self.device.put(padded(x)), len(x), *self._at, self.width, self.out, self.activation, y, shape[1]
        )
        return self.device.get(y, shape, np.float32)

    def exact(self, x: Floats) -> ref.Doubles:
        return ACTIVATIONS[self.activation](ref.exact(x) @ ref.exact(self.weight).T + ref.exact(self.bias))


@pytest.mark.parametrize(
    ("width", "out"),
    [(1024, 1024), (384, 384), (768, 2), (1024, 1), (312, 100), (99, 64), (1, 1), (2048, 33), (1028, 5), (1030, 31)],
)
def test_dense(device: Device, random: np.random.Generator, width: int, out: int) -> None:
    for dependent in (False, True):
        device.launch.dependent_launch(dependent)
        layer = Layer(device, random, width, out, IDENTITY)
        for rows in (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 100, 1000):
            x = random.standard_normal((rows, width)).astype(np.float32)
            assert ref.error(layer.run(x), layer.exact(x)) <= 1e-6, rows
            wide = layer.run(x, pitch_of(out) + 4)
            assert (wide[:, out:] == 0).all()
            assert wide[:, :out].tobytes() == layer.run(x).tobytes()
    empty = np.empty((0, width), np.float32)
    assert layer.run(empty).shape == (0, out)


@pytest.mark.parametrize("activation", range(len(ACTIVATIONS)))
def test_activations_of_dense(device: Device, random: np.random.Generator, activation: int) -> None:
    layer = Layer(device, random, 384, 64, activation)
    x = (random.standard_normal((33, 384)) * 4).astype(np.float32)
    x[:, 0] *= 50
    wanted = layer.exact(x)
    np.testing.assert_allclose(layer.run(x), wanted, rtol=1e-5, atol=2e-5)
    x[5] = np.nan
    got = layer.run(x)
    assert np.isnan(got[5]).all()
    assert np.isfinite(np.delete(got, 5, axis=0)).all()


@pytest.mark.parametrize(("width", "out"), [(1024, 1024), (99, 3), (1500, 40)])
def test_dense_is_batch_invariant(device: Device, random: np.random.Generator, width: int, out: int) -> None:
    layer = Layer(device, random, width, out, TANH)
    x = random.standard_normal((300, width)).astype(np.float32)
    together = layer.run(x)
    for rows in (1, 2, 3, 5, 8, 9, 16, 17, 100, 299):
        first = int(random.integers(0, len(x) - rows + 1))
        assert layer.run(x[first : first + rows]).tobytes() == together[first : first + rows].tobytes(), rows
    order = random.permutation(len(x))
    assert layer.run(x[order]).tobytes() == together[order].tobytes()


def test_what_dense_refuses(device: Device) -> None:
    with pytest.raises(RuntimeError, match=r"8 .*5 .*4"):
        device.launch.dense(1, 1, 2, 3, 8, 5, IDENTITY, 4, 4)
    with pytest.raises(RuntimeError, match="input"):
        device.launch.dense(1, 1, 2, 3, 8, 4, IDENTITY, 1, 4)


@pytest.mark.parametrize("width", [1, 31, 256, 1000, 3072])
def test_cut_rows(device: Device, random: np.random.Generator, width: int) -> None:
    cuts = [0, 1, max(1, width // 2), width, ref.KEEPS_LENGTH, ref.KEEPS_LENGTH | max(1, width // 3)]
    x = random.standard_normal((len(cuts), width)).astype(np.float32)
    x[0] = 0  # stays so
    wanted = ref.pool(ref.exact(x), [1] * len(cuts), ref.CLS, cuts)
    places = [device.put(x), device.put(np.array(cuts, np.uint32))]
    y = device.new(x.nbytes)
    device.launch.cut_rows(*places, 0, len(cuts), width, y)
    assert ref.error(device.get(y, x.shape, np.float32), wanted) <= 1e-6
    # Rows 0, 1, 2 of x are of the sequences 4, 1, 3.
    chosen = np.array([4, 1, 3], np.int32)
    y = device.new(3 * width * 4)
    device.launch.cut_rows(*places, device.put(chosen), 3, width, y)
    wanted = ref.pool(ref.exact(x[:3]), [1] * 3, ref.CLS, [cuts[i] for i in chosen])
    assert ref.error(device.get(y, (3, width), np.float32), wanted) <= 1e-6


@pytest.mark.parametrize("kind", [ref.CLS, ref.MEAN, ref.MAX, ref.LAST])
@pytest.mark.parametrize(
    ("dtype", "hidden", "parts"), [(ref.FLOAT16, 768, 1), (ref.BFLOAT16, 312, 4), (ref.FLOAT32, 384, 0)]
)
def test_pool_of_chosen_sequences(
    device: Device, random: np.random.Generator, kind: int, dtype: int, hidden: int, parts: int
) -> None:
    """They have the bits that they have among all, whether blocks share sequences or not."""
    lengths = [*ref.LENGTHS, 1200]
    states = ref.drawn(random, (sum(lengths), hidden), dtype)
    sums = random.random((sum(lengths), -(-hidden // 128) * max(parts, 1), 2)).astype(np.float32) * 100
    gamma, beta = (device.put(random.standard_normal(hidden).astype(np.float32)) for _ in range(2))
    norm = (device.put(sums), parts, gamma, beta, EPSILON) if parts else ()
    cuts = device.put(np.array([0, 5, ref.KEEPS_LENGTH] * 20, np.uint32)[: len(lengths)])
    keeps = device.put(np.full(len(lengths), ref.KEEPS_LENGTH, np.uint32))
    rows, places = device.put(states), device.put(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))

    def pooled(cuts: int, chosen: npt.NDArray[np.int32] | None, longest: int) -> Floats:
        count = len(lengths) if chosen is None else len(chosen)
        vectors = device.new(count * hidden * 4)
        device.launch.pool(
            dtype, kind, rows, places, cuts, count, hidden, vectors, *norm, longest=longest,
            chosen=0 if chosen is None else device.put(chosen),
        )  # fmt: skip
        return device.get(vectors, (count, hidden), np.float32)

    for dependent in (False, True):
        device.launch.dependent_launch(dependent)
        everyone = pooled(cuts, None, 1200)
        assert np.isfinite(everyone).all()
        for chosen in ([0], [18], [3, 17, 5], list(range(0, 19, 2)), list(range(19))):
            picked = np.array(chosen, np.int32)
            assert pooled(cuts, picked, 1200).tobytes() == everyone[picked].tobytes()
        assert pooled(0, None, 1200).tobytes() == pooled(keeps, None, 1200).tobytes()


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("columns", [8, 96, 128, 312, 1024, 3000])
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 1000])
def test_token_rows(device: Device, random: np.random.Generator, dtype: int, columns: int, rows: int) -> None:
    x = ref.drawn(random, (max(rows, 6), columns), dtype)
    x[1 % max(rows, 1)] = 0  # stays so
    at = device.put(x)
    chosen = random.permutation(len(x))[:rows].astype(np.int32)
    lengths = np.linalg.norm(ref.exact(x), axis=1, keepdims=True)
    for wanted, unit, limit in ((ref.exact(x), False, 0.0), (ref.exact(x) / np.maximum(lengths, 1e-12), True, 1e-6)):
        for index in (None, chosen):
            y = device.new(rows * columns * 4)
            device.launch.token_rows(dtype, at, 0 if index is None else device.put(index), rows, columns, unit, y)
            got = device.get(y, (rows, columns), np.float32)
            assert rows == 0 or ref.error(got, wanted[:rows] if index is None else wanted[index]) <= limit
            if index is None:
                together = got
    for row in range(0, rows, 97):  # in any batch
        y = device.new(columns * 4)
        device.launch.token_rows(dtype, at, device.put(np.array([row], np.int32)), 1, columns, True, y)
        assert device.get(y, (columns,), np.float32).tobytes() == together[row].tobytes()


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize(("hidden", "parts"), [(768, 0), (384, 1), (312, 4), (1024, 2), (1024, 8), (8, 1)])
def test_token_weights(device: Device, random: np.random.Generator, dtype: int, hidden: int, parts: int) -> None:
    rows = 777
    states = ref.stored(ref.with_outliers(random.standard_normal((rows, hidden)), random), dtype)
    gamma, beta, weight = (random.standard_normal(hidden).astype(np.float32) for _ in range(3))
    weight /= np.float32(np.sqrt(hidden))
    bias = random.standard_normal(1).astype(np.float32)
    h = ref.exact(states)
    norm: tuple[int, ...] = (0, 1, 0, 0)
    if parts:
        h = ref.layernorm(h, ref.exact(gamma), ref.exact(beta), EPSILON)
        sums = ref.group_sums(ref.exact(states), parts).astype(np.float32)
        sums[:, -(-hidden * parts // 128) :] = np.nan  # never written
        norm = (device.put(sums), parts, device.put(gamma), device.put(beta))
    products = h @ ref.exact(weight) + ref.exact(bias)
    wanted = np.maximum(products, 0)
    at, at_weight, at_bias = device.put(states), device.put(weight), device.put(bias)

    def weights(chosen: npt.NDArray[np.int32] | None) -> Floats:
        count = rows if chosen is None else len(chosen)
        y = device.new(count * 4)
        device.launch.token_weights(
            dtype, at, *norm, EPSILON, 0 if chosen is None else device.put(chosen), count, hidden, at_weight, at_bias, y
        )
        return device.get(y, (count,), np.float32)

    together = weights(None)
    assert ref.error(together, wanted) <= 1e-5
    assert (together[products < -1e-3] == 0).all()
    for count in (1, 2, 3, 4, 5, 100):
        chosen = random.permutation(rows)[:count].astype(np.int32)
        assert weights(chosen).tobytes() == together[chosen].tobytes()


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("hidden", [8, 312, 1024])
def test_marker_logits(device: Device, random: np.random.Generator, dtype: int, hidden: int) -> None:
    lengths, columns, marker = [1, 31, 200, 0, 300, 33], 255, 7
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rows = int(cu_seqlens[-1])
    ids = random.integers(0, 20, rows).astype(np.int32)
    ids[cu_seqlens[4] : cu_seqlens[5]] = marker  # more than there are columns
    states = ref.stored(random.standard_normal((rows, hidden)), dtype)
    weight, bias = (random.standard_normal(count).astype(np.float32) for count in (hidden, 1))
    weight /= np.float32(np.sqrt(hidden))
    products = ref.exact(states) @ ref.exact(weight) + ref.exact(bias)
    wanted = np.zeros((len(lengths), columns))
    for text, (first, end) in enumerate(itertools.pairwise(cu_seqlens)):
        found = products[first:end][ids[first:end] == marker][:columns]
        wanted[text, : len(found)] = found
    arrays = [device.put(each) for each in (states, ids, cu_seqlens)]
    for chosen in (None, np.array([4, 2], np.int32)):
        texts = wanted if chosen is None else wanted[chosen]
        y = device.new(texts.size * 4)
        device.launch.marker_logits(
            dtype, *arrays, 0 if chosen is None else device.put(chosen), len(texts), marker, hidden,
            device.put(weight), device.put(bias), columns, y,
        )  # fmt: skip
        got = device.get(y, texts.shape, np.float32)
        assert ref.error(got, texts) <= 1e-5
        assert ((got == 0) == (texts == 0)).all()


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize(("vocabulary", "hidden"), [(1, 8), (127, 4096), (1000, 312), (32_001, 1024)])
def test_vocabulary_mass(device: Device, random: np.random.Generator, dtype: int, vocabulary: int, hidden: int) -> None:
    """A row has the same bits alone, in any batch, and where memory holds the parts of few rows."""
    x = random.standard_normal((150, hidden)).astype(np.float32)
    x[::7] *= 30
    matrix = ref.drawn(random, (vocabulary, hidden), dtype, 4 / np.sqrt(hidden))
    wanted = np.logaddexp.reduce(ref.exact(ref.stored(x, dtype)) @ ref.exact(matrix).T, axis=1)
    at, parts = device.put(matrix), 2 * -(-vocabulary // 128)

    def masses(x: Floats, rows_at_once: int) -> Floats:
        rounded = 0 if dtype == ref.FLOAT32 else x.size // 2
        y, floats = device.new(len(x) * 4), rounded + rows_at_once * parts
        scratch = device.new(floats * 4)
        device.launch.vocabulary_mass(dtype, device.put(x), len(x), at, vocabulary, hidden, scratch, floats, y)
        return device.get(y, (len(x),), np.float32)

    for dependent in (False, True):
        device.launch.dependent_launch(dependent)
        together = masses(x, len(x))
        np.testing.assert_allclose(together, wanted, rtol=1e-5, atol=2e-4)
        for rows in (1, 2, 15, 16, 17, 32, 33, 64, 65, 128, 149):
            some = slice(first := int(random.integers(0, len(x) - rows + 1)), first + rows)
            for rows_at_once in (rows, 1 + rows // 3):
                assert masses(x[some], rows_at_once).tobytes() == together[some].tobytes(), rows
    x[5] = np.nan
    broken = masses(x, len(x))
    assert np.isnan(broken[5])
    assert np.delete(broken, 5).tobytes() == np.delete(together, 5).tobytes()
    assert masses(x[:0], 1).shape == (0,)


def test_sizes_that_heads_do_not_take(device: Device) -> None:
    with pytest.raises(RuntimeError, match=r"token_rows.* 100 "):
        device.launch.token_rows(ref.FLOAT16, 0, 0, 1, 100, True, 0)
    with pytest.raises(RuntimeError, match=r"token_weights.* 1032 "):
        device.launch.token_weights(ref.FLOAT16, 1, 1, 1, 1, 1, EPSILON, 0, 1, 1032, 1, 1, 1)
    with pytest.raises(RuntimeError, match=r"vocabulary_mass.* 100 rows of 12"):
        device.launch.vocabulary_mass(ref.FLOAT16, 0, 1, 0, 100, 12, 0, 1000, 0)
    with pytest.raises(RuntimeError, match="vocabulary_mass: no memory for 2 rows"):
        device.launch.vocabulary_mass(ref.FLOAT16, 0, 2, 0, 100, 64, 0, 65, 0)


# The multi-vector head's products: narrower than any of the layers'.
@pytest.mark.parametrize(
    ("provider", "dtype"), [("hopper", ref.FLOAT16), ("hopper", ref.BFLOAT16), ("cublaslt", ref.FLOAT32)]
)
@pytest.mark.parametrize(
    ("out", "width"), [(8, 384), (16, 768), (48, 256), (96, 384), (128, 768), (1024, 1024), (128, 312)]
)
def test_narrow_products(
    device: Device, random: np.random.Generator, provider: str, dtype: int, out: int, width: int
) -> None:
    weights = Weights(device, random, provider, dtype, out, width, ref.NONE)
    x = ref.stored(random.standard_normal((9000, width)), dtype)
    together = weights.run(x, None)
    limit = 1e-6 if dtype == ref.FLOAT32 else 1.2 * ref.rounding(weights.exact(x, None), dtype)
    assert ref.error(together, weights.exact(x, None)) <= limit
    for rows in (1, 15, 16, 17, 31, 33, 63, 65, 127, 129, 500, 1000, 4097, 8999):
        first = int(random.integers(0, len(x) - rows + 1))
        some = weights.run(x[first : first + rows], None)
        if provider == "hopper":
            assert some.tobytes() == together[first : first + rows].tobytes(), rows
        else:
            assert ref.error(some, weights.exact(x[first : first + rows], None)) <= limit
