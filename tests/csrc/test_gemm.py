"""The matrix product of each provider against float64, and the promise that a row's bits depend on the row alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from embert.engine.encoders.cuda.encoder import _cublaslt_library
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
        self,
        device: Device,
        random: np.random.Generator,
        provider: str,
        dtype: int,
        out: int,
        width: int,
        kind: int,
        **more: Any,
    ):
        self.weight = ref.stored(random.standard_normal((out, width)) / np.sqrt(width), dtype)
        bias = random.standard_normal(out)
        if provider == "cublaslt":  # adds what its type holds
            bias = ref.exact(ref.stored(bias, dtype))
        self.bias = bias.astype(np.float32)
        self.device, self.dtype, self.kind = device, dtype, kind
        try:
            self.product: Any = device.launch.product(
                provider, _cublaslt_library(), dtype, device.put(self.weight), device.put(self.bias), out, width, kind,
                **more,
            )  # fmt: skip
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


class Folded:
    """The two products around a LayerNorm: r = c·V + bias + residual, then activation(LayerNorm(r)·W + bias).

    And the one after: inner·U + bias + LayerNorm(r), so that a residual is normalized too. With gamma in the rows r is
    stored times that LayerNorm's gamma, and what the third leaves times the next one's.
    """

    def __init__(
        self, device: Device, random: np.random.Generator, dtype: int, hidden: int, inner: int, in_rows: bool
    ) -> None:
        self.device, self.dtype, self.hidden, self.inner = device, dtype, hidden, inner
        self.gamma, next_gamma = (self._drawn_gamma(random) for _ in range(2))
        self.beta = (random.standard_normal(hidden) / 4).astype(np.float32)
        gamma, beta, after = device.put(self.gamma), device.put(self.beta), device.put(next_gamma)
        # What r and the third's result are stored times.
        self.of_r = ref.exact(self.gamma) if in_rows else np.ones(hidden)
        self.of_third = ref.exact(next_gamma) if in_rows else np.ones(hidden)
        rows = {"prescaled_rows": in_rows}
        self.first = Weights(device, random, "hopper", dtype, hidden, hidden, ref.NONE, **rows, next_gamma=gamma)
        weight = random.standard_normal((inner, hidden)) / np.sqrt(hidden)
        self.weight, self.bias = ref.stored(weight, dtype), random.standard_normal(inner).astype(np.float32)
        exact = device.put(ref.exact(self.weight).astype(np.float32))
        self.second = device.launch.product(
            "hopper", "", dtype, device.put(self.weight), device.put(self.bias), inner, hidden, ref.GELU,
            gamma=gamma, beta=beta, epsilon=EPSILON, exact=exact, **rows,
        )  # fmt: skip
        self.third = Weights(
            device, random, "hopper", dtype, hidden, inner, ref.NONE,
            gamma=gamma, beta=beta, of_residual=True, epsilon=EPSILON, next_gamma=after, **rows,
        )  # fmt: skip

    def _drawn_gamma(self, random: np.random.Generator) -> npt.NDArray[np.float32]:
        """Such as the storage type holds, which it is rounded to where it is in the rows."""
        return ref.exact(ref.stored(random.uniform(0.2, 1.6, self.hidden), self.dtype)).astype(np.float32)

    def run(self, context: npt.NDArray[Any], residual: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """r, the second product, the third; as stored."""
        device, rows, size = self.device, len(context), context.itemsize
        launch = device.launch
        r, second, third = (device.new(rows * n * size) for n in (self.hidden, self.inner, self.hidden))
        sums = device.new(rows * (self.hidden // 128 + 1) * 8 * 8)
        last_sums = device.new(rows * (self.hidden // 128 + 1) * 8 * 8)
        self.first.product.run(launch, device.put(context), device.put(residual), rows, r, y_stats=sums)
        parts = self.first.product.splits
        self.second.run(launch, r, 0, rows, second, sums, parts)
        self.third.product.run(launch, second, r, rows, third, sums, parts, last_sums)
        shapes = [(rows, self.hidden), (rows, self.inner), (rows, self.hidden)]
        kind = numpy_type(self.dtype)
        return [device.get(at, shape, kind) for at, shape in zip((r, second, third), shapes, strict=True)]


EPSILON = 1e-12


# Rows off zero by their own deviation, ten times what models show, or by 20, of the 30 that are taken.
@pytest.mark.parametrize("offset", [1, 20])
@pytest.mark.parametrize("dtype", [ref.FLOAT16, ref.BFLOAT16])
@pytest.mark.parametrize(("hidden", "inner"), [(768, 3072), (384, 1536), (312, 1200), (1024, 4096)])
@pytest.mark.parametrize("in_rows", [False, True])
def test_layernorm_folded_into_the_products(
    device: Device, random: np.random.Generator, dtype: int, hidden: int, inner: int, offset: int, in_rows: bool
) -> None:
    folded = Folded(device, random, dtype, hidden, inner, in_rows)
    for rows in (1, 16, 17, 64, 200, 777, 3001):
        residual = random.standard_normal((rows, hidden)) + offset * random.standard_normal((rows, 1))
        # One channel is fifty times the rest.
        residual[:, 7] *= 50
        stored = ref.stored(residual, dtype)
        context = ref.stored(random.standard_normal((rows, hidden)), dtype)
        r, second, third = folded.run(context, stored)
        wanted = folded.first.exact(context, stored)
        assert ref.error(r, wanted * folded.of_r) <= 1.2 * ref.rounding(wanted * folded.of_r, dtype)
        # The sums are of r before its rounding; of one outlier's rounding a whole row's deviation would depend.
        deviation = np.sqrt(wanted.var(axis=1, keepdims=True) + EPSILON)
        norm = (ref.exact(r) / folded.of_r - wanted.mean(axis=1, keepdims=True)) / deviation
        norm = norm * ref.exact(folded.gamma) + ref.exact(folded.beta)
        wanted = ref.activation(norm @ ref.exact(folded.weight).T + ref.exact(folded.bias), ref.GELU)
        # As good as rounding the LayerNorm's output, which is what folding leaves out; few rows scatter.
        allowed = 1.3 if rows >= 64 else 1.6
        separate = ref.exact(ref.stored(norm, dtype)) @ ref.exact(folded.weight).T + ref.exact(folded.bias)
        limit = allowed * ref.error(ref.stored(ref.activation(separate, ref.GELU), dtype), wanted)
        assert ref.error(second, wanted) <= limit, rows
        wanted = (folded.third.exact(second, None) + norm) * folded.of_third
        assert ref.error(third, wanted) <= allowed * ref.rounding(wanted, dtype), rows


# Rows of which one kernel does the whole layer: as many tiles as clusters of blocks and fewer, tiles that several
# clusters share, a last tile with few rows.
@pytest.mark.parametrize("rows", [12_801, 16_896, 16_897, 26_368, 40_000])
@pytest.mark.parametrize(
    ("dtype", "kind", "inner", "gamma_in"),
    [
        (ref.FLOAT16, ref.GELU, 1536, "weights"),
        (ref.FLOAT16, ref.GELU, 1536, "rows"),
        (ref.FLOAT16, ref.GELU, 1536, ""),
        (ref.BFLOAT16, ref.GELU_TANH, 1536, "weights"),
        (ref.FLOAT16, ref.RELU, 64, "weights"),
        (ref.FLOAT16, ref.GELU, 960, "weights"),
        (ref.FLOAT16, ref.GELU, 128, "weights"),
    ],
    ids=["GELU", "prescaled_rows", "unfolded", "bfloat16", "one_chunk", "fifteen_chunks", "two_chunks"],
)
def test_both_products_in_one_kernel_have_the_bits_of_two(
    device: Device, random: np.random.Generator, rows: int, dtype: int, kind: int, inner: int, gamma_in: str
) -> None:
    hidden = 384
    in_weight = ref.stored(random.standard_normal((inner, hidden)) / np.sqrt(hidden), dtype)
    out_weight = ref.stored(random.standard_normal((hidden, inner)) / np.sqrt(inner), dtype)
    in_bias, out_bias = (random.standard_normal(n).astype(np.float32) for n in (inner, hidden))
    gamma, next_gamma = (random.uniform(0.2, 1.6, hidden).astype(np.float32) for _ in range(2))
    beta = (random.standard_normal(hidden) / 4).astype(np.float32)
    norm = {"gamma": device.put(gamma), "beta": device.put(beta), "epsilon": EPSILON} if gamma_in else {}
    if gamma_in == "weights":
        norm["exact"] = device.put(ref.exact(in_weight).astype(np.float32))
    elif gamma_in == "rows":
        norm |= {"prescaled_rows": True, "next_gamma": device.put(next_gamma)}
    both = device.launch.feed_forward(
        dtype, device.put(in_weight), device.put(in_bias), device.put(out_weight), device.put(out_bias), hidden, inner,
        kind, **norm,
    )  # fmt: skip
    stored = ref.stored(random.standard_normal((rows, hidden)) + random.standard_normal((rows, 1)), dtype)
    r = ref.exact(stored) / (gamma if gamma_in == "rows" else 1)
    x, x_sums = device.put(stored), device.put(ref.group_sums(r).astype(np.float32))
    scratch, y, y_stats = device.new(rows * inner * 2), device.new(rows * hidden * 2), device.new(rows * 3 * 8 * 8)

    def run(first: int, count: int, backwards: bool) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        of_x = x_sums + first * 24 if gamma_in else 0
        both.run(device.launch, x + first * hidden * 2, count, scratch, y, of_x, 1, y_stats, backwards)
        parts = device.get(y_stats, (count, 3, both.splits, 2), np.float32)
        while parts.shape[2] > 1:  # a balanced tree
            parts = parts[:, :, ::2] + parts[:, :, 1::2]
        return device.get(y, (count, hidden), numpy_type(dtype)).view(np.uint16), parts[:, :, 0]

    together, together_sums = run(0, rows, False)
    again, again_sums = run(0, rows, True)  # the other way, and with what the first run left between blocks
    assert (again == together).all()
    assert (again_sums == together_sums).all()
    for first in range(0, rows, 5_000):
        count = min(5_000, rows - first)
        some, some_sums = run(first, count, False)
        assert (some == together[first : first + count]).all(), first
        assert (some_sums == together_sums[first : first + count]).all(), first
    few, few_sums = run(0, 100, False)
    assert (few == together[:100]).all()
    assert (few_sums == together_sums[:100]).all()
