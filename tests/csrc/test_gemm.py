"""The matrix product of each provider against float64, and the promise that a row's bits depend on the row alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.encoders.cuda import _cublaslt_library
from tests.csrc import reference as ref
from tests.csrc.device import Device, numpy_type

pytestmark = pytest.mark.gpu

SHAPES = [
    (2304, 768),
    (768, 768),
    (3072, 768),
    (768, 3072),
    (1152, 384),
    (384, 1536),
    (1000, 312),
    (1024, 4096),
]  # out, in
CASES = [("hopper", ref.FLOAT16), ("hopper", ref.BFLOAT16), ("cublaslt", ref.FLOAT16), ("cublaslt", ref.FLOAT32)]


class Weights:
    """Weights on the device, and their product with any rows."""

    def __init__(
        self, device: Device, random: np.random.Generator, provider: str, dtype: int, out: int, width: int, kind: int
    ):
        self.weight = ref.stored(random.standard_normal((out, width)) / np.sqrt(width), dtype)
        self.bias = ref.stored(random.standard_normal(out), dtype)
        self.device, self.dtype, self.kind = device, dtype, kind
        try:
            self.product: Any = device.launch.product(
                provider, _cublaslt_library(), dtype, device.put(self.weight), device.put(self.bias), out, width, kind
            )
        except RuntimeError as error:
            pytest.skip(str(error))

    def run(self, x: npt.NDArray[Any], residual: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
        shape = (len(x), len(self.bias))
        y = self.device.new(int(np.prod(shape)) * x.itemsize)
        rest = 0 if residual is None else self.device.put(residual)
        self.product.run(self.device.launch, self.device.put(x), rest, len(x), y)
        return self.device.get(y, shape, numpy_type(self.dtype))

    def exact(self, x: npt.NDArray[Any], residual: npt.NDArray[Any] | None) -> ref.Doubles:
        y = ref.exact(x) @ ref.exact(self.weight).T + ref.exact(self.bias)
        return ref.activation(y if residual is None else y + ref.exact(residual), self.kind)


@pytest.mark.parametrize(("provider", "dtype"), CASES)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_against_float64(
    device: Device, random: np.random.Generator, provider: str, dtype: int, out: int, width: int
) -> None:
    weights = Weights(device, random, provider, dtype, out, width, ref.NONE)
    for rows in (1, 15, 16, 17, 63, 64, 65, 127, 129, 200, 257, 1000, 3001):
        x = ref.stored(random.standard_normal((rows, width)), dtype)
        for residual in (None, ref.stored(random.standard_normal((rows, out)), dtype)):
            wanted = weights.exact(x, residual)
            limit = 1e-6 if dtype == ref.FLOAT32 else 1.2 * ref.rounding(wanted, dtype)
            assert ref.error(weights.run(x, residual), wanted) <= limit, (rows, residual is None)


@pytest.mark.parametrize(("provider", "dtype"), CASES)
@pytest.mark.parametrize("kind", [ref.GELU, ref.GELU_TANH, ref.RELU])
def test_activation(device: Device, random: np.random.Generator, provider: str, dtype: int, kind: int) -> None:
    weights = Weights(device, random, provider, dtype, 3072, 768, kind)
    for rows in (5, 130, 2000):
        x = ref.stored(random.standard_normal((rows, 768)), dtype)
        wanted = weights.exact(x, None)
        # cuBLASLt's product is rounded before the activation's kernel reads it.
        limit = 1e-6 if dtype == ref.FLOAT32 else (1.2 if provider == "hopper" else 2.0) * ref.rounding(wanted, dtype)
        assert ref.error(weights.run(x, None), wanted) <= limit


@pytest.mark.parametrize("provider", ["hopper", "cublaslt"])
@pytest.mark.parametrize(("out", "width"), [(2304, 768), (768, 3072), (1536, 384)])
def test_a_row_has_the_same_bits_in_any_company(
    device: Device, random: np.random.Generator, provider: str, out: int, width: int
) -> None:
    weights = Weights(device, random, provider, ref.FLOAT16, out, width, ref.NONE)
    x = ref.stored(random.standard_normal((5000, width)), ref.FLOAT16)
    all_rows = weights.run(x, None).view(np.uint16)
    for rows in (1, 2, 8, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256, 500, 1000, 2500):
        first = int(random.integers(0, len(x) - rows + 1))
        some = weights.run(x[first : first + rows], None).view(np.uint16)
        assert (some == all_rows[first : first + rows]).all(), rows
