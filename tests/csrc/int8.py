"""Rows and weights in 8 bits as csrc/EPILOGUES.md defines them, in numpy, and a model of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embert.engine.architecture.architecture import Architecture
from embert.engine.checkpoint import Checkpoint
from embert.engine.encoders.cuda.int8 import quantised
from embert.engine.encoders.reference import _Reference

__all__ = ["BLOCK", "hidden_state", "quantised_rows", "rotated"]

BLOCK = 128
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


def rotated(x: Floats) -> Floats:
    """Each block of 128 columns of x [T, columns] times Sylvester's matrix, in float32, strides 1, 2, 4 … 64."""
    y = np.array(x, np.float32).reshape(-1)
    stride = 1
    while stride < BLOCK:
        pairs = y.reshape(-1, 2, stride)
        y = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        stride *= 2
    return y.reshape(x.shape)


def quantised_rows(x: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """Rows x [T, columns] in 8 bits: int8 [T, columns], and a scale for each, float32 [T]."""
    y = rotated(x)
    most = np.abs(y).max(axis=1)
    with np.errstate(divide="ignore"):
        inverse = np.where(most == 0, np.float32(0), np.float32(127) / most)
    q = np.rint(y * inverse[:, None]).astype(np.int8)
    return q, (most.astype(np.float64) / 127 / np.sqrt(BLOCK)).astype(np.float32)


def hidden_state(ids: Ints, architecture: Architecture, checkpoint: Checkpoint) -> Floats:
    """The last hidden state of token ids [L], the layers' products in 8 bits: float32 [L, hidden]."""
    return _Int8Reference(architecture, checkpoint).hidden_state(ids)


def _stored(x: npt.NDArray[np.floating]) -> Floats:
    """As rows between kernels are."""
    return x.astype(np.float16).astype(np.float32)


class _Int8Reference(_Reference):
    """Rows are rounded where kernels store them, so that quantising them rounds as it does there."""

    def _embedded(self, ids: Ints) -> Floats:
        return _stored(super()._embedded(ids))

    def _layer(self, x: Floats, layer: int, bias: Floats | None) -> Floats:
        """x: normalised."""
        at = f"encoder.layer.{layer}."
        context = _stored(self._attention(x, layer, bias))
        x = self._norm(
            _stored(x + self._linear(context, f"{at}attention.output.dense")), f"{at}attention.output.LayerNorm"
        )
        inner = _stored(self._activated(self._linear(x, f"{at}intermediate.dense")))
        return self._norm(_stored(x + self._linear(inner, f"{at}output.dense")), f"{at}output.LayerNorm")

    def _linear(self, x: Floats, name: str) -> Floats:
        weight, of_columns = quantised(self._checkpoint.float32(f"{name}.weight"))
        q, scales = quantised_rows(x)
        sums = q.astype(np.float64) @ weight.astype(np.float64).T  # exact
        y = sums.astype(np.float32) * scales[:, None] * of_columns + self._checkpoint.float32(f"{name}.bias")
        return _stored(y) if "attention.self" in name else y
