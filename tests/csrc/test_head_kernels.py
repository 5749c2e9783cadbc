"""The heads' kernels against float64: outputs start as NaN, with guards behind them; batch-invariant."""

from __future__ import annotations

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
IDENTITY, TANH = range(2)


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
