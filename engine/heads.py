"""What follows pooling, for encoders that do not fuse it: dense layers, the Matryoshka cut, L2 normalisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embert.engine.errors import BrokenModel
from embert.engine.model import Model
from embert.engine.safetensors_file import FLOATS, SafetensorsFile

__all__ = ["DenseLayer", "Heads", "load_dense"]

Floats = npt.NDArray[np.float32]


def _sigmoid(x: Floats) -> Floats:
    # Half of 1 + tanh(x / 2): the same function, and exp cannot overflow.
    half = np.float32(0.5)
    y: Floats = np.tanh(half * x) * half + half
    return y


ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, np.float32(0)),
    "sigmoid": _sigmoid,
}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """activation(x · weightᵀ + bias)."""

    weight: Floats  # [out, in]
    bias: Floats | None  # [out]
    activation: str

    def __call__(self, x: Floats) -> Floats:
        """float32 [B, in] → float32 [B, out]."""
        y = x @ self.weight.T
        if self.bias is not None:
            y += self.bias
        return ACTIVATIONS[self.activation](y)


def load_dense(model: Model) -> tuple[DenseLayer, ...]:
    """Read the weights of a model's dense layers. Raises BrokenModel."""
    layers = []
    for spec in model.dense:
        file = SafetensorsFile(model.folder / spec.folder / "model.safetensors")
        weight = _tensor(file, "linear.weight", (spec.outputs, spec.inputs))
        bias = _tensor(file, "linear.bias", (spec.outputs,)) if spec.bias else None
        layers.append(DenseLayer(weight, bias, spec.activation))
    return tuple(layers)


class Heads:
    """Pooled rows to the vectors of an EMBED answer."""

    def __init__(self, model: Model) -> None:
        self._dense = load_dense(model)

    def __call__(
        self,
        pooled: Floats,
        dimensions: npt.NDArray[np.int32] | None = None,
        normalize: npt.NDArray[np.bool_] | None = None,
    ) -> Floats:
        """float32 [B, hidden] → float32 [B, width]; may change `pooled`.

        `dimensions` [B] cuts row i to its first dimensions[i] columns (0: all) and zeroes the rest. `normalize` [B]
        says which rows are then divided by their L2 norm, all when None. A zero row stays zero.
        """
        vectors = pooled
        for layer in self._dense:
            vectors = layer(vectors)
        if dimensions is not None and dimensions.any():
            kept = np.where(dimensions == 0, vectors.shape[1], dimensions)
            vectors[np.arange(vectors.shape[1]) >= kept[:, None]] = 0
        if normalize is None or normalize.any():
            norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
            # sentence-transformers divides by max(norm, 1e-12) too.
            scale = np.float32(1) / np.maximum(norms, np.float32(1e-12))
            if normalize is not None:
                scale[~normalize] = 1
            vectors *= scale[:, None]
        return vectors


def _tensor(file: SafetensorsFile, name: str, shape: tuple[int, ...]) -> Floats:
    if name not in file:
        raise BrokenModel(f"{file.path} has no tensor {name}")
    tensor = file.tensor(name)
    if tensor.shape != shape:
        raise BrokenModel(f"{file.path}: {name} has shape {list(tensor.shape)}, config.json implies {list(shape)}")
    if tensor.dtype not in FLOATS:
        raise BrokenModel(f"{file.path}: {name} has dtype {tensor.dtype}, expected one of {', '.join(FLOATS)}")
    return tensor.float32()
