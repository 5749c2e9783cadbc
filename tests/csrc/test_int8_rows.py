"""Rows in 8 bits against numpy, to the bit: quantized rows, and the context of attention. csrc/EPILOGUES.md."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tests.csrc import int8
from tests.csrc import reference as ref
from tests.csrc.device import Device
from tests.csrc.int8_device import EPSILON, Floats, sums_of
from tests.csrc.test_attention import drawn_relative, run_attention
from tests.oracles.int8_rows import block_rows, rounded_blocks

pytestmark = pytest.mark.gpu


def quantize(
    device: Device, x: npt.NDArray[np.float16], sums: int = 0, gamma: int = 0, beta: int = 0, parts: int = 1
) -> tuple[npt.NDArray[np.int8], Floats]:
    rows, columns = x.shape
    data, scales = device.new(x.size), device.new(rows * 4)
    device.launch.quantize(device.put(x), sums, parts, gamma, beta, rows, columns, EPSILON, data, scales)
    return device.get(data, x.shape, np.int8), device.get(scales, (rows,), np.float32)


@pytest.mark.parametrize("columns", [128, 256, 384, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 8192])
def test_rows_are_those_of_numpy_to_the_bit(device: Device, random: np.random.Generator, columns: int) -> None:
    for rows in (1, 3, 4, 5, 64, 1001, 9000 if columns <= 1024 else 700):
        spread = 10.0 ** random.integers(-5, 4, (rows, 1))
        x = ref.with_outliers(random.standard_normal((rows, columns)), random) * spread
        x = x.clip(-65000, 65000).astype(np.float16)
        x[rows // 2] = 0
        q, scales = quantize(device, x)
        wanted, of_rows = int8.quantized_rows(x)
        assert (q == wanted).all(), rows
        assert (scales == of_rows).all(), rows
        assert scales[rows // 2] == 0


@pytest.mark.parametrize("columns", [128, 384, 768, 1024])
def test_normalized_rows_are_those_of_numpy_within_a_step(
    device: Device, random: np.random.Generator, columns: int
) -> None:
    gamma, beta = random.uniform(0.5, 1.5, columns), random.standard_normal(columns) / 4
    at = device.put(gamma.astype(np.float32)), device.put(beta.astype(np.float32))
    for rows in (1, 5, 64, 1001, 9000):
        x = ref.with_outliers(random.standard_normal((rows, columns)) * 3 + 0.2, random).astype(np.float16)
        parts = 4 if rows <= 64 else 1  # as products leave them
        q, scales = quantize(device, x, device.put(sums_of(x, parts)), *at, parts)
        wanted, of_rows = int8.quantized_rows(
            ref.layernorm(x.astype(np.float64), gamma, beta, EPSILON).astype(np.float16)
        )
        apart = np.abs(q.astype(int) - wanted)
        assert apart.max() <= 1, rows
        assert (apart > 0).mean() <= 2e-3, rows  # where rounding to float16 went the other way
        assert np.allclose(scales, of_rows, rtol=2e-3)


def test_a_row_that_is_not_finite_has_no_finite_scale(device: Device, random: np.random.Generator) -> None:
    x = random.standard_normal((3, 4096)).astype(np.float16)
    x[0, 77], x[2, 4000] = np.nan, np.inf
    _, scales = quantize(device, x)
    assert (np.isfinite(scales) == [False, True, False]).all()


def inner_rows(random: np.random.Generator, rows: int, columns: int) -> npt.NDArray[np.float16]:
    """Rows like those after the feed-forward part's first product: a few large values, and the rest near 0."""
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
        device.launch.quantize_blocks(device.put(x), rows, columns, block, data, scales)
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
    device.launch.quantize_blocks(device.put(x), *x.shape, 128, data, scales)
    assert (device.get(data, x.shape, np.int8) == block_rows(x).integers).all()


def test_an_inner_row_that_is_not_finite_has_no_finite_scale(device: Device, random: np.random.Generator) -> None:
    x = inner_rows(random, 3, 4096)
    x[0, 77], x[2, 4000] = np.nan, np.inf
    data, scales = device.new(x.size), device.new(12)
    device.launch.quantize_blocks(device.put(x), *x.shape, 128, data, scales)
    assert (np.isfinite(device.get(scales, (3,), np.float32)) == [False, True, False]).all()


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
