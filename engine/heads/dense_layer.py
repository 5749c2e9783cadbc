"""Linear layers of heads with their weights, in numpy: norm(activation(x · weightᵀ + bias))."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embert.engine.errors import BrokenModel
from embert.engine.files.safetensors_file import SafetensorsFile
from embert.engine.heads.dense import Dense

__all__ = ["DenseLayer", "LayerNorm", "load_dense"]

Floats = npt.NDArray[np.float32]


def _sigmoid(x: Floats) -> Floats:
    # sigmoid(x) = (1 + tanh(x / 2)) / 2. Unlike exp, tanh cannot overflow.
    half = np.float32(0.5)
    y: Floats = np.tanh(half * x) * half + half
    return y


def _silu(x: Floats) -> Floats:
    y: Floats = x * _sigmoid(x)
    return y


def _gelu(x: Floats) -> Floats:
    # numpy has no erf. Abramowitz and Stegun, formula 7.1.26, which is at most 1.5e-7 off.
    z = np.abs(x) / np.float64(math.sqrt(2))
    t = 1 / (1 + 0.3275911 * z)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = np.copysign(1 - series * np.exp(-z * z), x)
    y: Floats = (x * (1 + erf) / 2).astype(np.float32)
    return y


def _gelu_tanh(x: Floats) -> Floats:
    half, inner = np.float32(0.5), np.float32(math.sqrt(2 / math.pi))
    y: Floats = half * x * (1 + np.tanh(inner * (x + np.float32(0.044715) * x * x * x)))
    return y


ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, np.float32(0)),
    "sigmoid": _sigmoid,
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """gamma · (x - mean) / √(variance + eps) + beta."""

    gamma: Floats  # [columns]
    beta: Floats | None  # [columns]
    eps: float

    def __call__(self, x: Floats) -> Floats:
        """float32 [B, columns] → float32 [B, columns]."""
        centred = x - x.mean(1, keepdims=True)
        variance = np.einsum("ij,ij->i", centred, centred)[:, None] / np.float32(x.shape[1])
        y: Floats = centred / np.sqrt(variance + np.float32(self.eps)) * self.gamma
        return y if self.beta is None else y + self.beta


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer with its weights."""

    weight: Floats  # [out, in]
    bias: Floats | None  # [out]
    activation: str
    norm: LayerNorm | None = None

    def __call__(self, x: Floats) -> Floats:
        """float32 [B, in] → float32 [B, out]."""
        y = x @ self.weight.T
        if self.bias is not None:
            y += self.bias
        y = ACTIVATIONS[self.activation](y)
        return y if self.norm is None else self.norm(y)


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
