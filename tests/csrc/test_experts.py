"""Routed feed-forward networks against float64, with the bits of a row in any batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from embert.engine.encoders.cuda.encoder import _cublaslt_library
from tests.csrc import reference as ref
from tests.csrc.device import Device, numpy_type

pytestmark = pytest.mark.gpu

CASES = [("hopper", ref.FLOAT16), ("hopper", ref.BFLOAT16), ("cublaslt", ref.FLOAT16), ("cublaslt", ref.FLOAT32)]
EPSILON = 1e-5


class Routed:
    """Experts on the device, and their sum with a norm."""

    def __init__(
        self, device: Device, random: np.random.Generator, provider: str, dtype: int, hidden: int, inner: int,
        count: int, top_k: int,
    ) -> None:  # fmt: skip
        self.device, self.dtype, self.hidden, self.top_k = device, dtype, hidden, top_k
        self.count, self.inner_columns = count, inner
        self.inner = ref.drawn(random, (count, inner, hidden), dtype, hidden**-0.5)
        self.out = ref.drawn(random, (count, hidden, inner), dtype, inner**-0.5)
        self.router = (random.standard_normal((count, hidden)) * hidden**-0.5).astype(np.float32)  # shares far from 0
        self.vectors = [random.standard_normal(hidden).astype(np.float32) for _ in range(3)]
        self.parameters = [device.put(each) for each in (self.router, *self.vectors)]
        weights = device.put(self.inner), device.put(self.out)
        try:
            self.products: Any = device.launch.experts(
                provider, _cublaslt_library(), dtype, *weights, count, hidden, inner, ref.GELU
            )
        except RuntimeError as error:
            pytest.skip(str(error))

    def run(self, x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The rows, and the experts of each."""
        rows, outputs, put = len(x), len(x) * self.top_k, self.device.new
        slots = max(rows * self.count, (outputs // 256 + min(outputs, self.count)) * 256)
        routed = put(outputs * 8), put(outputs * 4), put(-(-rows // 32) * self.count * 4), put((slots + 1) * 4)
        memory = put(slots * self.inner_columns * x.itemsize), put(slots * self.hidden * x.itemsize)
        y, (router, *vectors) = put(x.nbytes), self.parameters
        self.products.run(
            self.device.launch, self.dtype, self.device.put(x), router, rows, self.hidden, self.count, self.top_k,
            *routed, *memory, *vectors, EPSILON, y,
        )  # fmt: skip
        routes = self.device.get(routed[0], (rows, self.top_k, 2), np.int32)[..., 0]
        return self.device.get(y, x.shape, numpy_type(self.dtype)), routes

    def exact(self, x: npt.NDArray[Any], routes: npt.NDArray[Any]) -> ref.Doubles:
        values = ref.exact(x)
        logits = values @ self.router.T.astype(np.float64)
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        taken = np.take_along_axis(shares, routes, 1)
        least = np.sort(shares, 1)[:, -self.top_k]
        assert (np.diff(routes, axis=1) > 0).all()  # no expert twice
        assert (taken.min(1) >= least * (1 - 1e-4)).all()
        bias, gamma, beta = (each.astype(np.float64) for each in self.vectors)
        total = values + bias
        for expert in range(self.count):
            rows, places = np.nonzero(routes == expert)
            inner = ref.activation(values[rows] @ ref.exact(self.inner[expert]).T, ref.GELU)
            total[rows] += (inner @ ref.exact(self.out[expert]).T) * taken[rows, places, None]
        return ref.layernorm(total, gamma, beta, EPSILON)


@pytest.mark.parametrize(("provider", "dtype"), CASES)
@pytest.mark.parametrize(
    ("hidden", "inner", "count", "top_k"), [(768, 3072, 8, 2), (72, 40, 5, 3), (256, 512, 32, 1), (1024, 136, 1, 1)]
)
def test_rows_pass_their_experts(
    device: Device, random: np.random.Generator, provider: str, dtype: int, hidden: int, inner: int, count: int,
    top_k: int,
) -> None:  # fmt: skip
    routed = Routed(device, random, provider, dtype, hidden, inner, count, top_k)
    x = ref.drawn(random, (900, hidden), dtype)
    together, _ = routed.run(x)
    for rows in (1, 31, 33, 600, 900):
        some = random.permutation(900)[:rows]
        got, routes = routed.run(x[some])
        wanted = routed.exact(x[some], routes)
        assert ref.error(got, wanted) <= (1e-5 if dtype == ref.FLOAT32 else 2 * ref.rounding(wanted, dtype))
        assert provider != "hopper" or got.tobytes() == together[some].tobytes()


def test_all_rows_may_pass_one_expert(device: Device, random: np.random.Generator) -> None:
    routed = Routed(device, random, "hopper", ref.FLOAT16, 64, 64, 4, 1)
    x = np.repeat(ref.drawn(random, (1, 64), ref.FLOAT16), 1000, 0)
    got, routes = routed.run(x)
    assert ref.error(got, routed.exact(x, routes)) <= 2 * ref.rounding(routed.exact(x, routes), ref.FLOAT16)
