"""The embedding head after pooling, in numpy: the modules after it, the Matryoshka cut, L2 normalization.

Encoders that fuse the cut and the normalization into their own work call it only where there are modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embert.engine.errors import BrokenModel
from embert.engine.files.safetensors_file import SafetensorsFile
from embert.engine.heads import pooling
from embert.engine.heads.pooling import Module

Floats = npt.NDArray[np.float32]

TORCH_EPSILON = 1e-5  # of its LayerNorm


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
        centered = x - x.mean(1, keepdims=True)
        variance = np.einsum("ij,ij->i", centered, centered)[:, None] / np.float32(x.shape[1])
        y: Floats = centered / np.sqrt(variance + np.float32(self.eps)) * self.gamma
        return y if self.beta is None else y + self.beta


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer with its weights. With a residual its argument is added, or a projection of that."""

    weight: Floats  # [out, in]
    bias: Floats | None  # [out]
    activation: str
    norm: LayerNorm | None = None
    residual: bool = False
    projection: Floats | None = None  # [out, in]

    def __call__(self, x: Floats) -> Floats:
        y = x @ self.weight.T
        if self.bias is not None:
            y += self.bias
        y = ACTIVATIONS[self.activation](y)
        if self.residual:
            y = y + (x if self.projection is None else x @ self.projection.T)
        return y if self.norm is None else self.norm(y)


def normalize_rows(x: Floats) -> Floats:
    """Rows of length 1; a row of zeros stays zeros. float32 [B, columns] → float32 [B, columns]."""
    # sentence-transformers, too, divides by max(norm, 1e-12).
    y: Floats = x / np.maximum(np.sqrt(np.einsum("ij,ij->i", x, x)), np.float32(1e-12))[:, None]
    return y


def _whole_numbers(x: Floats) -> Floats:
    y: Floats = np.rint(np.tanh(x) * np.float32(127))
    return y


def load_modules(folder: Path, modules: Sequence[pooling.Module]) -> tuple[Callable[[Floats], Floats], ...]:
    """The modules after a model's pooling, with their weights. Raises BrokenModel."""
    return tuple(_load_module(folder, module) for module in modules)


def _load_module(folder: Path, module: pooling.Module) -> Callable[[Floats], Floats]:
    if isinstance(module, pooling.Normalize):
        return normalize_rows
    if isinstance(module, pooling.Quantize):
        return _whole_numbers
    if isinstance(module, pooling.LayerNorm):
        file = SafetensorsFile(folder / module.folder / "model.safetensors")
        gamma, beta = (_tensor(file, f"norm.{part}", (module.columns,)) for part in ("weight", "bias"))
        return LayerNorm(gamma, beta, TORCH_EPSILON)
    file = SafetensorsFile(folder / module.folder / module.file)
    shape = (module.outputs, module.inputs)
    projects = module.residual and module.inputs != module.outputs
    return DenseLayer(
        _tensor(file, f"{module.name}.weight", shape),
        _tensor(file, f"{module.name}.bias", (module.outputs,)) if module.bias else None,
        module.activation,
        residual=module.residual,
        projection=_tensor(file, "residual.weight", shape) if projects else None,
    )


def _tensor(file: SafetensorsFile, name: str, shape: tuple[int, ...]) -> Floats:
    if name not in file:
        raise BrokenModel(f"{file.path} has no tensor {name}")
    tensor = file.tensor(name)
    tensor.check(file.path, name, shape)
    return tensor.float32()


MakeLinear = Callable[[Floats, Floats | None, str], Callable[[Floats], Floats]]


class EmbeddingHead:
    """Makes embeddings of pooled rows."""

    def __init__(
        self, folder: Path, modules: Sequence[Module], *, rows: int = 0, linear: MakeLinear | None = None
    ) -> None:
        """Load the weights of the modules after pooling of the model in `folder`. Raises BrokenModel.

        `rows` are those of `through`. `linear` makes the products of layers without a residual, of a weight, a bias and
        an activation; None: numpy's.
        """
        steps = load_modules(folder, modules)
        if linear is not None:
            steps = tuple(
                linear(module.weight, module.bias, module.activation)
                if isinstance(module, DenseLayer) and not module.residual
                else module
                for module in steps
            )
        self._modules = steps
        self._rows = rows

    def __call__(
        self,
        pooled: Floats,
        dimensions: npt.NDArray[np.int32] | None = None,
        normalize: npt.NDArray[np.bool_] | None = None,
    ) -> Floats:
        """float32 [B, pooled columns] → float32 [B, width]. May change `pooled`.

        `dimensions` [B] keeps the first dimensions[i] columns of row i (0: all) and zeroes the rest. `normalize` [B]
        says which rows are then divided by their L2 norm; None means all. A row of zeros stays zeros.
        """
        vectors = through(self._modules, pooled, self._rows) if self._modules else pooled
        if dimensions is not None and dimensions.any():
            widths = np.where(dimensions == 0, vectors.shape[1], dimensions)
            vectors[np.arange(vectors.shape[1]) >= widths[:, None]] = 0
        if normalize is None or normalize.any():
            norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
            # sentence-transformers, too, divides by max(norm, 1e-12).
            scale = np.float32(1) / np.maximum(norms, np.float32(1e-12))
            if normalize is not None:
                scale[~normalize] = 1
            vectors *= scale[:, None]
        return vectors


def through(modules: Sequence[Callable[[Floats], Floats]], x: Floats, rows: int = 0) -> Floats:
    """Rows after all modules, `rows` at once, padded with rows of zeros; 0: all at once.

    Products of other shapes may add their terms in another order, and results are batch-invariant.
    """
    if rows:
        padded = np.zeros((max(1, -(-len(x) // rows)) * rows, x.shape[1]), np.float32)
        padded[: len(x)] = x
        blocks = [through(modules, padded[first : first + rows]) for first in range(0, len(padded), rows)]
        return np.concatenate(blocks)[: len(x)]
    for module in modules:
        x = module(x)
    return x
