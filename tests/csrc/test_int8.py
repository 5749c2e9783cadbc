"""Rows and products in 8 bits beside numpy and float64, and whole encoders of them: csrc/EPILOGUES.md."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.lib.texts import english
from embert import engine
from embert.engine.checkpoint import Checkpoint
from embert.engine.encoders.cuda import CudaEncoder, _cublaslt_library
from embert.engine.engine import Engine
from embert.engine.errors import UnsupportedModel
from embert.engine.quantization.agreement import agreement_of_rows
from embert.engine.quantization.blocks import aligned_rows, block_rows, block_weight, rounded_blocks
from embert.engine.quantization.quarters import quarter_weight
from tests.csrc import int8
from tests.csrc import reference as ref
from tests.csrc.device import Device
from tests.csrc.encoder.random_models import LARGE, NARROW, cosines, packed, part, random_bert, relative_error
from tests.csrc.test_attention import drawn_relative, run_attention
from tests.engine import families

pytestmark = pytest.mark.gpu

EPSILON = 1e-12
ROWS = (1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 255, 257, 1000, 3001)
PROVIDERS = ("hopper", "cublaslt")
Floats = npt.NDArray[Any]


def quantise(
    device: Device, x: npt.NDArray[np.float16], sums: int = 0, gamma: int = 0, beta: int = 0, parts: int = 1
) -> tuple[npt.NDArray[np.int8], Floats]:
    rows, columns = x.shape
    data, scales = device.new(x.size), device.new(rows * 4)
    device.launch.quantise(device.put(x), sums, parts, gamma, beta, rows, columns, EPSILON, data, scales)
    return device.get(data, x.shape, np.int8), device.get(scales, (rows,), np.float32)


def sums_of(rows: Floats, parts: int = 1) -> Floats:
    """What producers leave of rows [T, columns]: float32 [T, groups · parts, 2]."""
    groups = rows.astype(np.float64).reshape(len(rows), -1, 128 // parts)
    return np.stack([groups.sum(axis=2), np.square(groups).sum(axis=2)], axis=2).astype(np.float32)


@pytest.mark.parametrize("columns", [128, 256, 384, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 8192])
def test_rows_are_those_of_numpy_to_the_bit(device: Device, random: np.random.Generator, columns: int) -> None:
    for rows in (1, 3, 4, 5, 64, 1001, 9000 if columns <= 1024 else 700):
        spread = 10.0 ** random.integers(-5, 4, (rows, 1))
        x = ref.with_outliers(random.standard_normal((rows, columns)), random) * spread
        x = x.clip(-65000, 65000).astype(np.float16)
        x[rows // 2] = 0
        q, scales = quantise(device, x)
        wanted, of_rows = int8.quantised_rows(x)
        assert (q == wanted).all(), rows
        assert (scales == of_rows).all(), rows
        assert scales[rows // 2] == 0


@pytest.mark.parametrize("columns", [128, 384, 768, 1024])
def test_normalised_rows_are_those_of_numpy_within_a_step(
    device: Device, random: np.random.Generator, columns: int
) -> None:
    gamma, beta = random.uniform(0.5, 1.5, columns), random.standard_normal(columns) / 4
    at = device.put(gamma.astype(np.float32)), device.put(beta.astype(np.float32))
    for rows in (1, 5, 64, 1001, 9000):
        x = ref.with_outliers(random.standard_normal((rows, columns)) * 3 + 0.2, random).astype(np.float16)
        parts = 4 if rows <= 64 else 1  # as products leave them
        q, scales = quantise(device, x, device.put(sums_of(x, parts)), *at, parts)
        wanted, of_rows = int8.quantised_rows(
            ref.layernorm(x.astype(np.float64), gamma, beta, EPSILON).astype(np.float16)
        )
        apart = np.abs(q.astype(int) - wanted)
        assert apart.max() <= 1, rows
        assert (apart > 0).mean() <= 2e-3, rows  # where rounding to float16 went the other way
        assert np.allclose(scales, of_rows, rtol=2e-3)


def test_a_row_that_is_not_finite_has_no_finite_scale(device: Device, random: np.random.Generator) -> None:
    x = random.standard_normal((3, 4096)).astype(np.float16)
    x[0, 77], x[2, 4000] = np.nan, np.inf
    _, scales = quantise(device, x)
    assert (np.isfinite(scales) == [False, True, False]).all()


def inner_rows(random: np.random.Generator, rows: int, columns: int) -> npt.NDArray[np.float16]:
    """As the feed-forward part's first product leaves them: a few large values, and the rest near 0."""
    x = random.standard_normal((rows, columns)) * 10.0 ** random.integers(-4, 3, (rows, 1))
    return np.where(x > 0, x * random.random((rows, columns)) ** 4, -0.05 * np.abs(x)).astype(np.float16)


@pytest.mark.parametrize("block", [128, 64])
@pytest.mark.parametrize("columns", [128, 256, 384, 1536, 2048, 2176, 3072, 4096, 8192])
def test_rows_in_blocks_are_those_of_numpy_to_the_bit(
    device: Device, random: np.random.Generator, columns: int, block: int
) -> None:
    for rows in (1, 3, 15, 16, 17, 33, 64, 1001):
        x = inner_rows(random, rows, columns)
        x[rows // 2] = 0
        data, scales = device.new(x.size), device.new(rows * 4)
        device.launch.quantise_blocks(device.put(x), rows, columns, block, data, scales)
        wanted = block_rows(x, block)
        assert (device.get(data, x.shape, np.int8) == wanted.integers).all(), rows
        assert (device.get(scales, (rows,), np.float32) == wanted.scales[:, 0]).all(), rows


def test_every_maximum_has_its_inverse(device: Device) -> None:
    """127 over a maximum comes from an approximation, and is rounded as the exact quotient all the same."""
    values = np.arange(0x1400, 0x5C00, dtype=np.uint16).view(np.float16)  # 2⁻¹⁰ to 256: others are these times 2ⁿ
    x = np.zeros((len(values), 128), np.float16)
    x[:, 0] = values  # its 16 rotated elements are all this large
    x[:, 1:8] = values[:, None] * np.linspace(0.1, 0.9, 7).astype(np.float16)
    data, scales = device.new(x.size), device.new(len(x) * 4)
    device.launch.quantise_blocks(device.put(x), *x.shape, 128, data, scales)
    assert (device.get(data, x.shape, np.int8) == block_rows(x).integers).all()


def test_an_inner_row_that_is_not_finite_has_no_finite_scale(device: Device, random: np.random.Generator) -> None:
    x = inner_rows(random, 3, 4096)
    x[0, 77], x[2, 4000] = np.nan, np.inf
    data, scales = device.new(x.size), device.new(12)
    device.launch.quantise_blocks(device.put(x), *x.shape, 128, data, scales)
    assert (np.isfinite(device.get(scales, (3,), np.float32)) == [False, True, False]).all()


class Product:
    """A product of 8 bits on the device; the memory for quantised rows can be read."""

    def __init__(
        self, device: Device, random: np.random.Generator, out: int, width: int, kind: int = ref.NONE,
        norm: tuple[Floats, Floats] | None = None, of_residual: bool = False, most: int = 3001,
        provider: str = "hopper",
    ) -> None:  # fmt: skip
        self.device, self.kind, self.of_residual = device, kind, of_residual
        self.inner = width > out  # a feed-forward part's second product
        weight = (random.standard_normal((out, width)) / np.sqrt(width)).astype(np.float32)
        self.weight, self.scales = (block_weight if self.inner else quarter_weight)(weight, "weight")
        self.bias = random.standard_normal(out).astype(np.float32)
        self.norm = norm
        self.data, self.row_scales = device.new(-(-most // 32) * 32 * width), device.new(most * 4)
        self.vectors = [device.put(each) for each in (self.weight, self.scales, self.bias)]
        self.vectors += [0, 0] if norm is None else [device.put(each.astype(np.float32)) for each in norm]
        self.product: Any = self.made_by(provider)

    def made_by(self, provider: str) -> Any:
        """The same by either provider. Skips where the GPU or the build does not have it."""
        weight, scales, bias, gamma, beta = self.vectors
        try:
            return self.device.launch.int8_product(
                weight, scales, bias, *self.weight.shape, self.kind, gamma, beta, self.of_residual, EPSILON, self.data,
                self.row_scales, provider, _cublaslt_library(), 128 if self.inner else 0,
            )  # fmt: skip
        except RuntimeError as error:
            pytest.skip(str(error))

    def run(self, x: npt.NDArray[np.float16], residual: npt.NDArray[np.float16] | None = None) -> Floats:
        """y, and what it leaves in `self.y_sums`."""
        rows, out, device = len(x), len(self.bias), self.device
        y, y_sums = device.new(rows * out * 2), device.new(rows * out // 2)
        normed = self.norm is not None and not self.of_residual
        self.product.run(
            device.launch, device.put(x), device.put(sums_of(x)) if normed else 0,
            0 if residual is None else device.put(residual),
            0 if residual is None else device.put(sums_of(residual)), 1, rows, y, 0 if residual is None else y_sums,
        )  # fmt: skip
        found = device.get(y, (rows, out), np.float16)
        if residual is not None:
            found_sums = device.get(y_sums, (rows, out // 128, self.product.parts, 2), np.float32)
            while found_sums.shape[2] > 1:  # norm/row_sums.cuh
                found_sums = found_sums[:, :, ::2] + found_sums[:, :, 1::2]
            self.y_sums = found_sums[:, :, 0]
        return found

    def sums(self, rows: int) -> tuple[npt.NDArray[np.int64], Floats]:
        """The exact sums of what the last run multiplied, and the scales of its rows."""
        q = self.device.get(self.data, (rows, self.weight.shape[1]), np.int8)
        sums = q.astype(np.float64) @ self.weight.astype(np.float64).T
        return sums.astype(np.int64), self.device.get(self.row_scales, (rows,), np.float32)

    def scaled(self, rows: int) -> tuple[Floats, Floats]:
        """The product without its bias as FP32 has it, and the scales of columns."""
        sums, scales = self.sums(rows)
        return sums.astype(np.float32) * scales[:, None], self.scales


PLAIN = [(3072, 1024), (4096, 1024), (2304, 768), (1152, 384), (1536, 384), (384, 128), (192, 256)]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(("out", "width"), PLAIN)
def test_sums_are_exact(device: Device, random: np.random.Generator, out: int, width: int, provider: str) -> None:
    """Two multiplications, an addition and roundings that numpy can repeat: any other sum would show."""
    product = Product(device, random, out, width, provider=provider)
    for rows in ROWS:
        found = product.run(random.standard_normal((rows, width)).astype(np.float16))
        scaled, of_columns = product.scaled(rows)
        wanted = (scaled.astype(np.float64) * of_columns + product.bias).astype(np.float32).astype(np.float16)
        assert (found.view(np.uint16) != wanted.view(np.uint16)).mean() <= 1e-6, rows  # float64 rounds twice
        assert np.abs(found.astype(np.float32) - wanted).max() <= 1e-2


# Activations before 8 bits are computed in FP16, a rounding for each step.
PAIR_ERROR = {ref.NONE: 1.2, ref.RELU: 1.2, ref.GELU: 6, ref.GELU_TANH: 6}


@pytest.mark.parametrize(("out", "width"), PLAIN[:4])
@pytest.mark.parametrize("kind", [ref.GELU, ref.GELU_TANH, ref.RELU])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_activations_and_the_layernorm_of_x(
    device: Device, random: np.random.Generator, out: int, width: int, kind: int, provider: str
) -> None:
    norm = random.uniform(0.5, 1.5, width), random.standard_normal(width) / 4
    product = Product(device, random, out, width, kind, norm, provider=provider)
    for rows in (5, 130, 3001):
        found = product.run((random.standard_normal((rows, width)) * 2).astype(np.float16))
        scaled, of_columns = product.scaled(rows)
        wanted = ref.activation(scaled.astype(np.float64) * of_columns + product.bias, kind) / 4
        assert ref.error(found, wanted) <= PAIR_ERROR[kind] * ref.rounding(wanted, ref.FLOAT16), rows


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(("out", "width"), [(1024, 1024), (1024, 4096), (768, 3072), (768, 768), (384, 1536)])
def test_a_residual_its_layernorm_and_sums(
    device: Device, random: np.random.Generator, out: int, width: int, provider: str
) -> None:
    gamma, beta = random.uniform(0.5, 1.5, out), random.standard_normal(out) / 4
    product = Product(device, random, out, width, norm=(gamma, beta), of_residual=True, most=7000, provider=provider)
    for rows in (*ROWS, 6100):  # 6 100: the last rows of tiles are narrow
        x = random.standard_normal((rows, width)).astype(np.float16)
        residual = (random.standard_normal((rows, out)) * 3 + 0.1).astype(np.float16)
        found = product.run(x, residual)
        scaled, of_columns = product.scaled(rows)
        wanted = scaled.astype(np.float64) * of_columns + product.bias
        wanted += ref.layernorm(residual.astype(np.float64), gamma, beta, EPSILON)
        assert ref.error(found, wanted) <= 1.2 * ref.rounding(wanted, ref.FLOAT16), rows
        groups = wanted.reshape(rows, -1, 128)
        assert ref.error(product.y_sums, np.stack([groups.sum(axis=2), (groups**2).sum(axis=2)], axis=2)) <= 1e-5


@pytest.mark.parametrize("provider", PROVIDERS)
def test_each_kernel_of_8_bits_on_narrow_products(device: Device, random: np.random.Generator, provider: str) -> None:
    """Few and many rows, tiles in turn and shared, narrow and tall ones: small enough for racecheck."""
    gamma, beta = random.uniform(0.5, 1.5, 384), random.standard_normal(384) / 4
    plain = Product(device, random, 384, 128, ref.GELU, (gamma[:128], beta[:128]), most=7000, provider=provider)
    adds = Product(device, random, 384, 128, norm=(gamma, beta), of_residual=True, most=7000, provider=provider)
    for rows in (17, 129, 1000, 3001, 6100):
        x = random.standard_normal((rows, 128)).astype(np.float16)
        residual = random.standard_normal((rows, 384)).astype(np.float16)
        found = plain.run(x), adds.run(x, residual)
        for product, y in zip((plain, adds), found, strict=True):
            scaled, of_columns = product.scaled(rows)
            wanted = scaled.astype(np.float64) * of_columns + product.bias
            if product is adds:
                wanted += ref.layernorm(residual.astype(np.float64), gamma, beta, EPSILON)
            if product is plain:
                wanted = ref.activation(wanted, product.kind) / 4
            assert ref.error(y, wanted) <= PAIR_ERROR[product.kind] * ref.rounding(wanted, ref.FLOAT16), rows


COMPANY = [(3072, 1024, False), (1024, 4096, True), (384, 1536, True)]


def in_company(device: Device, random: np.random.Generator, out: int, width: int, adds: bool, provider: str) -> Product:
    norm = (random.uniform(0.5, 1.5, out), random.standard_normal(out) / 4) if adds else None
    return Product(device, random, out, width, norm=norm, of_residual=adds, most=20_000, provider=provider)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(("out", "width", "adds"), COMPANY)
def test_a_row_has_the_same_bits_in_any_company(
    device: Device, random: np.random.Generator, out: int, width: int, adds: bool, provider: str
) -> None:
    product = in_company(device, random, out, width, adds, provider)
    x = random.standard_normal((20_000, width)).astype(np.float16)
    residual = random.standard_normal((20_000, out)).astype(np.float16)
    together = product.run(x, residual if adds else None)
    for rows in (1, 2, 16, 17, 64, 65, 128, 129, 500, 1000, 2500, 6100, 10_000):
        some = random.permutation(len(x))[:rows]
        alone = product.run(x[some], residual[some] if adds else None)
        assert (alone.view(np.uint16) == together[some].view(np.uint16)).all(), rows


@pytest.mark.parametrize(("out", "width", "adds"), COMPANY)
def test_both_providers_leave_the_same_bits(
    device: Device, random: np.random.Generator, out: int, width: int, adds: bool
) -> None:
    product = in_company(device, random, out, width, adds, "hopper")
    both = {"hopper": product.product, "cublaslt": product.made_by("cublaslt")}
    for rows in (*ROWS, 20_000):  # with the last, sums do not fit their memory at once
        x = random.standard_normal((rows, width)).astype(np.float16)
        residual = random.standard_normal((rows, out)).astype(np.float16) if adds else None
        bits = {}
        for provider, product.product in both.items():
            bits[provider] = product.run(x, residual).tobytes() + (product.y_sums.tobytes() if adds else b"")
        assert bits["hopper"] == bits["cublaslt"], rows


class FeedForward:
    """Both products of a feed-forward part, whose inner rows can be read."""

    def __init__(
        self, device: Device, random: np.random.Generator, hidden: int, inner: int, kind: int, most: int
    ) -> None:
        self.device, self.hidden, self.inner, self.kind = device, hidden, inner, kind
        first = (random.standard_normal((inner, hidden)) / np.sqrt(hidden)).astype(np.float32)
        second = (random.standard_normal((hidden, inner)) / np.sqrt(inner)).astype(np.float32)
        self.in_, self.out = quarter_weight(first, "in"), block_weight(second, "out")
        self.biases = [random.standard_normal(n).astype(np.float32) / 4 for n in (inner, hidden)]
        norms = [random.uniform(0.5, 1.5, hidden), random.standard_normal(hidden) / 4] * 2
        self.norms = [device.put(each.astype(np.float32)) for each in norms]
        most = -(-most // 32) * 32
        self.data, self.row_scales = device.new(most * max(hidden, inner)), device.new(most * 4)
        self.rows_between = device.new(most * inner * 2)
        self.vectors = [
            [device.put(each) for each in (*of, bias)]
            for of, bias in zip((self.in_, self.out), self.biases, strict=True)
        ]

    def made_by(self, provider: str) -> Any:
        try:
            return self.device.launch.int8_feed_forward(
                *self.vectors, self.hidden, self.inner, self.kind, self.norms, EPSILON, self.data, self.row_scales,
                provider, _cublaslt_library(),
            )  # fmt: skip
        except RuntimeError as error:
            pytest.skip(str(error))

    def run(self, made: Any, x: npt.NDArray[np.float16]) -> Floats:
        rows = len(x)
        y, y_sums = self.device.new(x.size * 2), self.device.new(x.size // 2)
        made.run(
            self.device.launch, self.device.put(x), self.device.put(sums_of(x)), 1, rows, self.rows_between, y, y_sums
        )
        return self.device.get(y, x.shape, np.float16)


WIDTHS = [(1024, 4096), (768, 3072), (384, 1536), (256, 640)]


@pytest.mark.parametrize("kind", [ref.GELU, ref.GELU_TANH, ref.RELU])
@pytest.mark.parametrize(("hidden", "inner"), WIDTHS)
def test_inner_rows_pass_in_blocks_of_numpys_bits(
    device: Device, random: np.random.Generator, hidden: int, inner: int, kind: int
) -> None:
    """Few rows pass in float16, which numpy turns into what many rows pass as."""
    of = FeedForward(device, random, hidden, inner, kind, 8000)
    made = of.made_by("hopper")
    x = random.standard_normal((8000, hidden)).astype(np.float16)
    of.run(made, x)
    size = len(x) * inner
    memory = device.get(of.rows_between, (size + size // 64,), np.uint8)
    for first in (0, 4000, 7984):
        of.run(made, x[first : first + 16])
        wanted = rounded_blocks(device.get(of.rows_between, (16, inner), np.float16))
        found = memory[first * inner : (first + 16) * inner].astype(int).reshape(16, inner) - 128
        maxima = memory[size:].view(np.float16).reshape(len(x), -1)[first : first + 16]
        assert (found == wanted.integers).all()
        assert (maxima == wanted.maxima).all()
        aligned = aligned_rows(wanted)
        assert (device.get(of.data, (16, inner), np.int8) == aligned.integers).all()


@pytest.mark.parametrize(("hidden", "inner"), WIDTHS)
def test_a_feed_forward_row_has_the_same_bits_in_any_company_and_by_either_provider(
    device: Device, random: np.random.Generator, hidden: int, inner: int
) -> None:
    of = FeedForward(device, random, hidden, inner, ref.GELU, 16_400)
    ours, theirs = of.made_by("hopper"), of.made_by("cublaslt")
    x = random.standard_normal((16_400, hidden)).astype(np.float16)
    together = of.run(ours, x)
    assert np.isfinite(together).all()
    assert of.run(theirs, x).tobytes() == together.tobytes()
    for rows in (1, 16, 17, 65, 129, 500, 1000, 1500, 2500, 6100, 10_000):
        some = random.permutation(len(x))[:rows]
        assert of.run(ours, x[some]).tobytes() == together[some].tobytes(), rows


def test_a_feed_forward_part_is_the_exact_one_but_for_8_bits(device: Device, random: np.random.Generator) -> None:
    of = FeedForward(device, random, 768, 3072, ref.GELU, 5000)
    made = of.made_by("hopper")
    x = random.standard_normal((5000, 768)).astype(np.float16)
    found = of.run(made, x)
    gamma, beta = (device.get(at, (768,), np.float32).astype(np.float64) for at in of.norms[:2])
    normed = ref.layernorm(x.astype(np.float64), gamma, beta, EPSILON)
    rows = int8.quantised_rows(normed.astype(np.float16))
    first = rows[0].astype(np.float64) @ of.in_.integers.T * rows[1][:, None] * of.in_.scales + of.biases[0]
    inner = block_rows((ref.activation(first, ref.GELU) / 4).astype(np.float16))
    wanted = inner.integers.astype(np.float64) @ of.out.integers.T * inner.scales * of.out.scales + of.biases[1]
    assert ref.error(found, wanted + normed) <= 4e-3  # integers that differ by one, as FP16 rounds


LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200, 383, 512]


@pytest.mark.parametrize("with_scores", [False, True])
@pytest.mark.parametrize("heads", [16, 2])
def test_attention_leaves_the_blocks_of_its_context(
    device: Device, random: np.random.Generator, heads: int, with_scores: bool
) -> None:
    hidden, total = heads * 64, sum(LENGTHS)
    qkv = (4 * random.standard_normal((total, 3 * hidden))).astype(np.float16)
    scores = drawn_relative(random, heads, 512) if with_scores else None
    context = run_attention(device, ref.FLOAT16, qkv, LENGTHS, heads, True, relative=scores)
    table, reach = (None, 0) if scores is None else ref.relative_table(scores, 64)
    long, short = ref.tiles(LENGTHS)
    data, maxima = device.new(total * hidden), device.new(total * heads * 2)
    device.launch.attention_in_blocks(
        device.put(qkv), total, device.put(long), len(long), device.put(short), len(short), heads, data, maxima,
         0 if table is None else device.put(table), reach,
    )  # fmt: skip
    wanted = rounded_blocks(context.astype(np.float16), 64)
    assert (device.get(data, context.shape, np.uint8).astype(int) - 128 == wanted.integers).all()
    assert (device.get(maxima, wanted.maxima.shape, np.float16) == wanted.maxima).all()


def encoder_of(folder: Path, dtype: str, **options: Any) -> CudaEncoder:
    try:
        return CudaEncoder(engine.load_model(str(folder)), max_batch_tokens=16384, dtype=dtype, **options)
    except UnsupportedModel as error:
        if "compute capability 9.0" not in str(error) and "this build has no cuBLASLt" not in str(error):
            raise
        pytest.skip(str(error))


BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
SIZES = {"narrow": NARROW, "base": BASE, "large": LARGE}


@pytest.mark.parametrize("gemm", PROVIDERS)
@pytest.mark.parametrize("size", SIZES)
def test_a_model_agrees_with_float16(tmp_path: Path, random: np.random.Generator, size: str, gemm: str) -> None:
    folder = random_bert(tmp_path, **SIZES[size])
    batch = packed(random, random.integers(1, 300, 80))
    ours = encoder_of(folder, "int8", gemm=gemm)
    assert (ours.dtype, ours.gemm) == ("int8", gemm)
    found = ours.encode(batch)
    ours.close()
    exact = encoder_of(folder, "float16", gemm=gemm)
    assert cosines(found, exact.encode(batch)).min() >= 0.999
    exact.close()


@pytest.mark.parametrize("gemm", PROVIDERS)
@pytest.mark.parametrize("config", [NARROW | {"num_hidden_layers": 1}, BASE | {"num_hidden_layers": 1}])
def test_a_model_agrees_with_numpys_in_8_bits(
    tmp_path: Path, random: np.random.Generator, config: dict[str, Any], gemm: str
) -> None:
    folder = random_bert(tmp_path, **config)
    model = engine.load_model(str(folder))
    checkpoint = Checkpoint.open(model)
    ours = encoder_of(folder, "int8", gemm=gemm)
    lengths = np.array([1, 17, 130])
    batch = packed(random, lengths, normalize=np.zeros(3, np.bool_))
    found = ours.encode(batch)
    ours.close()
    unrounded = engine.load_encoder(model, device="cpu").encode(batch)
    wanted = np.stack(
        [
            int8.hidden_state(batch.ids[begin:end], model.architecture, checkpoint).mean(axis=0)
            for begin, end in itertools.pairwise(batch.cu_seqlens)
        ]
    )
    # One step of 8 bits more or less moves what comes after it, so bits are not equal; it is much nearer all the same.
    print(relative_error(found, wanted), relative_error(found, unrounded))
    assert relative_error(found, wanted) <= 0.8 * relative_error(found, unrounded)


@pytest.mark.parametrize("gemm", PROVIDERS)
@pytest.mark.parametrize("size", ["narrow", "base"])
def test_a_text_has_the_same_bits_in_any_company(
    tmp_path: Path, random: np.random.Generator, size: str, gemm: str
) -> None:
    ours = encoder_of(random_bert(tmp_path, **SIZES[size]), "int8", gemm=gemm)
    lengths = np.concatenate([[1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 128, 129, 511, 512], random.integers(1, 200, 50)])
    batch = packed(random, lengths)
    everyone = np.arange(len(lengths))
    together = ours.encode(part(batch, everyone))
    for _ in range(20):
        rows = random.permutation(everyone)[: int(random.integers(1, len(everyone) + 1))]
        assert ours.encode(part(batch, rows)).tobytes() == together[rows].tobytes()
    for row in everyone:
        assert ours.encode(part(batch, everyone[row : row + 1])).tobytes() == together[[row]].tobytes()
    ours.close()


@pytest.mark.parametrize("gemm", PROVIDERS)
@pytest.mark.parametrize("architecture", ["xlm-roberta", "roberta, padded with 5", "distilbert", "mpnet"])
def test_other_architectures(tmp_path: Path, random: np.random.Generator, architecture: str, gemm: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 512}
    if architecture == "distilbert":
        sizes = {"dim": 256, "n_heads": 8, "hidden_dim": 512}
    folder = families.build(tmp_path, architecture, vocab_size=30522, **sizes)
    (folder / "tokenizer.json").write_text("{}")
    ours = encoder_of(folder, "int8", gemm=gemm)
    batch = packed(random, np.array([1, 17, 64, 65, 128]))
    wanted = engine.load_encoder(engine.load_model(str(folder)), device="cpu").encode(batch)
    assert (
        cosines(ours.encode(batch), wanted).min() >= 0.99
    )  # weights as large as these make attention pick single tokens
    ours.close()


def test_what_it_refuses(tmp_path: Path) -> None:
    for config, named in (
        ({"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}, "hidden size 192"),
        ({"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1000}, "intermediate size 1000"),
    ):
        folder = tmp_path / named.replace(" ", "-")
        folder.mkdir()
        model = engine.load_model(str(random_bert(folder, num_hidden_layers=1, **config)))
        with pytest.raises(UnsupportedModel, match=named):
            CudaEncoder(model, dtype="int8")


def test_another_gpu_than_hopper_is_not_used_without_being_asked_for(tmp_path: Path) -> None:
    model = engine.load_model(str(random_bert(tmp_path, **(BASE | {"num_hidden_layers": 1}))))
    usual = CudaEncoder(model, dtype="float16", graphs=False)
    usual.close()
    if usual.compute_capability == 90:
        pytest.skip("this one is Hopper")
    with pytest.raises(UnsupportedModel, match="ask for them with --encoder cuda-portable"):
        CudaEncoder(model, dtype="int8")


def test_a_thousand_english_sentences_keep_their_neighbours() -> None:
    """On real weights, beside the same model in float16."""
    sentences = english(1000)
    vectors = []
    for dtype in ("int8", "float16"):
        with Engine.load(engine.load_model(), device="cuda", dtype=dtype) as loaded:
            vectors.append(loaded.embed(sentences))
    ours, theirs = vectors
    found = agreement_of_rows(ours, theirs, dtype="float16")
    print(found)
    assert found.worst >= 0.999
    assert found.neighbours is not None
    assert found.neighbours >= 0.98
