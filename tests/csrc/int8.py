"""Rows and a model in 8 bits by quarters (engine/quantization), with rows rounded as kernels store them."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from embert.engine.encoders.cuda.weights import column_factors
from embert.engine.encoders.self_test import _Reference
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.quantization.blocks import HEAD, block_weight, quarter_weight
from embert.engine.quantization.rows import product
from embert.engine.weights.checkpoint import Checkpoint
from tests.oracles.int8_rows import block_rows, quarter_rows

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


def quantized_rows(x: npt.NDArray[np.float16]) -> tuple[npt.NDArray[np.int8], Floats]:
    """Rows x [T, columns] in 8 bits: int8 [T, columns], and a scale for each, float32 [T]."""
    rows = quarter_rows(x)
    return rows.integers, rows.scales[:, 0]


def hidden_state(ids: Ints, config: EncoderConfig, checkpoint: Checkpoint) -> Floats:
    """The last hidden state of token ids [L], the layers' products in 8 bits: float32 [L, hidden]."""
    return _Int8Reference(config, checkpoint, -1, int8=False).hidden_state(ids)


def _stored(x: npt.NDArray[np.floating]) -> Floats:
    """Rounds to the type of rows between kernels."""
    return x.astype(np.float16).astype(np.float32)


class _Int8Reference(_Reference):
    """Rows are rounded where kernels store them, so that quantizing them rounds as it does there."""

    def _embed(self, ids: Ints) -> Floats:
        return _stored(super()._embed(ids))

    def _layer(self, x: Floats, layer: int, bias: Floats | None) -> Floats:
        """x: normalized."""
        at = f"encoder.layer.{layer}."
        context = _stored(self._attention(x, layer, bias))
        x = self._norm(
            _stored(x + self._attended(context, f"{at}attention.output.dense")), f"{at}attention.output.LayerNorm"
        )
        inner = self._activate(_stored(self._linear(x, f"{at}intermediate.dense")))
        return self._norm(_stored(x + self._out(inner, f"{at}output.dense")), f"{at}output.LayerNorm")

    def _attended(self, context: Floats, name: str) -> Floats:
        blocks = self._config.head_size == HEAD
        return self._of_blocks(context, name, HEAD) if blocks else self._linear(context, name)

    def _out(self, inner: Floats, name: str) -> Floats:
        return self._of_blocks(inner / 4, name, 128)

    def _of_blocks(self, x: npt.NDArray[np.floating], name: str, block: int) -> Floats:
        weight, bias = (self._checkpoint.float32(f"{name}.{each}") for each in ("weight", "bias"))
        return product(block_rows(x.astype(np.float16), block), block_weight(weight, name, block), bias)

    @functools.cached_property
    def _factors(self) -> dict[str, Floats]:
        return column_factors(self._config, self._checkpoint)

    def _linear(self, x: Floats, name: str) -> Floats:
        weight, bias = (self._checkpoint.float32(f"{name}.{each}") for each in ("weight", "bias"))
        by = self._factors.get(name, np.float32(1))
        y = product(quarter_rows((x / by).astype(np.float16)), quarter_weight(weight * by, name), bias)
        return _stored(y) if "attention.self" in name else y
