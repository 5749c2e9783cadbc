"""Dense modules with their weights: activation(x · weightᵀ + bias)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embert.engine.errors import BrokenModel
from embert.engine.files.safetensors_file import SafetensorsFile
from embert.engine.heads.dense import Dense

__all__ = ["DenseLayer", "load_dense"]

Floats = npt.NDArray[np.float32]


def _sigmoid(x: Floats) -> Floats:
    # sigmoid(x) = (1 + tanh(x / 2)) / 2. Unlike exp, tanh cannot overflow.
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
    """A Dense module with its weights."""

    weight: Floats  # [out, in]
    bias: Floats | None  # [out]
    activation: str

    def __call__(self, x: Floats) -> Floats:
        """float32 [B, in] → float32 [B, out]."""
        y = x @ self.weight.T
        if self.bias is not None:
            y += self.bias
        return ACTIVATIONS[self.activation](y)


def load_dense(folder: Path, modules: tuple[Dense, ...]) -> tuple[DenseLayer, ...]:
    """Load the weights of a model's Dense modules. Raises BrokenModel."""
    layers = []
    for module in modules:
        file = SafetensorsFile(folder / module.folder / "model.safetensors")
        weight = _tensor(file, "linear.weight", (module.outputs, module.inputs))
        bias = _tensor(file, "linear.bias", (module.outputs,)) if module.bias else None
        layers.append(DenseLayer(weight, bias, module.activation))
    return tuple(layers)


def _tensor(file: SafetensorsFile, name: str, shape: tuple[int, ...]) -> Floats:
    if name not in file:
        raise BrokenModel(f"{file.path} has no tensor {name}")
    tensor = file.tensor(name)
    tensor.check(file.path, name, shape)
    return tensor.float32()
