"""Products in 8 bits against numpy and float64: csrc/EPILOGUES.md."""

from __future__ import annotations

import numpy as np
import pytest

from tests.csrc import reference as ref
from tests.csrc.device import Device
from tests.csrc.int8_device import EPSILON, Product

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 255, 257, 1000, 3001)
PLAIN = [(3072, 1024), (4096, 1024), (2304, 768), (1152, 384), (1536, 384), (384, 128), (192, 256)]


@pytest.mark.parametrize(("out", "width"), PLAIN)
def test_sums_are_exact(device: Device, random: np.random.Generator, out: int, width: int) -> None:
    """Two multiplications, an addition and roundings that numpy can repeat: any other sum would show."""
    product = Product(device, random, out, width)
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
def test_activations_and_the_layernorm_of_x(
    device: Device, random: np.random.Generator, out: int, width: int, kind: int
) -> None:
    norm = random.uniform(0.5, 1.5, width), random.standard_normal(width) / 4
    product = Product(device, random, out, width, kind, norm)
    for rows in (5, 130, 3001):
        found = product.run((random.standard_normal((rows, width)) * 2).astype(np.float16))
        scaled, of_columns = product.scaled(rows)
        wanted = ref.activation(scaled.astype(np.float64) * of_columns + product.bias, kind) / 4
        assert ref.error(found, wanted) <= PAIR_ERROR[kind] * ref.rounding(wanted, ref.FLOAT16), rows


@pytest.mark.parametrize(("out", "width"), [(1024, 1024), (1024, 4096), (768, 3072), (768, 768), (384, 1536)])
def test_a_residual_its_layernorm_and_sums(device: Device, random: np.random.Generator, out: int, width: int) -> None:
    gamma, beta = random.uniform(0.5, 1.5, out), random.standard_normal(out) / 4
    product = Product(device, random, out, width, norm=(gamma, beta), of_residual=True, most=7000)
    for rows in (*ROWS, 6100, 7000):  # 6 100: the last rows of tiles are narrow; 7 000: tiles in turn
        x = random.standard_normal((rows, width)).astype(np.float16)
        residual = (random.standard_normal((rows, out)) * 3 + 0.1).astype(np.float16)
        found = product.run(x, residual)
        scaled, of_columns = product.scaled(rows)
        wanted = scaled.astype(np.float64) * of_columns + product.bias
        wanted += ref.layernorm(residual.astype(np.float64), gamma, beta, EPSILON)
        assert ref.error(found, wanted) <= 1.2 * ref.rounding(wanted, ref.FLOAT16), rows
        assert ref.error(product.y_stats, ref.group_sums(wanted)) <= 1e-5


def test_each_kernel_of_8_bits_on_narrow_products(device: Device, random: np.random.Generator) -> None:
    """Few and many rows, tiles in turn and shared, narrow and tall ones: small enough for racecheck."""
    gamma, beta = random.uniform(0.5, 1.5, 384), random.standard_normal(384) / 4
    plain = Product(device, random, 384, 128, ref.GELU, (gamma[:128], beta[:128]), most=7000)
    adds = Product(device, random, 384, 128, norm=(gamma, beta), of_residual=True, most=7000)
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
