"""The feed-forward part in 8 bits, whose inner rows pass in blocks: csrc/EPILOGUES.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from embert.engine.quantization.blocks import block_weight, quarter_weight
from tests.csrc import reference as ref
from tests.csrc.device import Device
from tests.csrc.int8_device import EPSILON, Floats, sums_of
from tests.oracles.int8_rows import aligned_rows, rounded_blocks

pytestmark = pytest.mark.gpu


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
        norm = random.uniform(0.5, 1.5, hidden), random.standard_normal(hidden) / 4
        self.norm = [device.put(each.astype(np.float32)) for each in norm]
        most = -(-most // 32) * 32
        self.data, self.row_scales = device.new(most * max(hidden, inner)), device.new(most * 4)
        self.rows_between = device.new(most * inner * 2)
        self.vectors = [
            [device.put(each) for each in (*of, bias)]
            for of, bias in zip((self.in_, self.out), self.biases, strict=True)
        ]

    def made(self) -> Any:
        """Skips where the GPU does not have it."""
        try:
            (in_weight, in_scales, in_bias), (out_weight, out_scales, out_bias) = self.vectors
            return self.device.launch.feed_forward(
                ref.FLOAT16, in_weight, in_bias, out_weight, out_bias, self.hidden, self.inner, self.kind, *self.norm,
                EPSILON, in_scales=in_scales, out_scales=out_scales, data=self.data, row_scales=self.row_scales,
            )  # fmt: skip
        except RuntimeError as error:
            pytest.skip(str(error))

    def run(self, made: Any, x: npt.NDArray[np.float16]) -> Floats:
        rows = len(x)
        y, y_stats = self.device.new(x.size * 2), self.device.new(x.size // 2)
        sums = self.device.put(sums_of(x))
        made.run(self.device.launch, self.device.put(x), rows, self.rows_between, y, sums, 1, y_stats)
        return self.device.get(y, x.shape, np.float16)


WIDTHS = [(1024, 4096), (768, 3072), (384, 1536), (256, 640)]


@pytest.mark.parametrize("kind", [ref.GELU, ref.GELU_TANH, ref.RELU])
@pytest.mark.parametrize(("hidden", "inner"), WIDTHS)
def test_inner_rows_pass_in_blocks_of_numpys_bits(
    device: Device, random: np.random.Generator, hidden: int, inner: int, kind: int
) -> None:
    """Few rows pass in float16, which numpy turns into what many rows pass as."""
    of = FeedForward(device, random, hidden, inner, kind, 8000)
    made = of.made()
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
def test_a_feed_forward_row_has_the_same_bits_in_any_batch(
    device: Device, random: np.random.Generator, hidden: int, inner: int
) -> None:
    of = FeedForward(device, random, hidden, inner, ref.GELU, 16_400)
    ours = of.made()
    x = random.standard_normal((16_400, hidden)).astype(np.float16)
    together = of.run(ours, x)
    assert np.isfinite(together).all()
    for rows in (1, 16, 17, 65, 129, 500, 1000, 1500, 2500, 6100, 10_000):
        some = random.permutation(len(x))[:rows]
        assert of.run(ours, x[some]).tobytes() == together[some].tobytes(), rows
