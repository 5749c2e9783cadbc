"""Dense modules: linear layers after pooling, each activation(x · weightᵀ + bias)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.json_files import read_object
from embert.engine.safetensors_file import SafetensorsFile

__all__ = ["Dense", "DenseLayer", "load_dense", "read_dense"]

Floats = npt.NDArray[np.float32]

# torch's class → our name.
ACTIVATION_CLASSES = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "Sigmoid": "sigmoid"}


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
class Dense:
    """What a Dense module's `config.json` says."""

    folder: str  # inside the model's folder; holds model.safetensors
    inputs: int  # columns in
    outputs: int  # columns out
    bias: bool
    activation: str  # "identity", "tanh", "relu", "sigmoid"


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


def read_dense(folder: Path, name: str) -> Dense:
    """Read the Dense module in the folder `name` of a model's `folder`. Raises BrokenModel or UnsupportedModel."""
    path = folder / name / "config.json"
    fields = read_object(path)
    # sentence-transformers' own default is Tanh.
    activation = str(fields.get("activation_function") or "torch.nn.modules.activation.Tanh")
    kind = activation.rpartition(".")[2]
    if kind not in ACTIVATION_CLASSES or not activation.startswith("torch.nn."):
        raise UnsupportedModel(
            f"{path}: activation_function {activation} is not supported; supported: {', '.join(ACTIVATION_CLASSES)}"
        )
    _only(path, fields, "use_residual", False)
    _only(path, fields, "module_input_name", "sentence_embedding")
    _only(path, fields, "module_output_name", "sentence_embedding", None)
    inputs, outputs = fields.get("in_features"), fields.get("out_features")
    if not isinstance(inputs, int) or not isinstance(outputs, int) or min(inputs, outputs) < 1:
        raise BrokenModel(f"{path}: in_features and out_features must be positive ints, found {inputs!r}, {outputs!r}")
    if not (folder / name / "model.safetensors").is_file():
        if (folder / name / "pytorch_model.bin").is_file():
            raise UnsupportedModel(
                f"{folder / name} has only pickled weights (pytorch_model.bin), which can run code when read and are "
                "refused; convert the model once with: pip install sentence-transformers && "
                'python -c "from sentence_transformers import '
                f"SentenceTransformer as S; S('{folder}').save('{folder}')\""
            )
        raise BrokenModel(f"{folder / name} has no model.safetensors")
    return Dense(name, inputs, outputs, bool(fields.get("bias", True)), ACTIVATION_CLASSES[kind])


def load_dense(folder: Path, modules: tuple[Dense, ...]) -> tuple[DenseLayer, ...]:
    """Load the weights of a model's Dense modules. Raises BrokenModel."""
    layers = []
    for module in modules:
        file = SafetensorsFile(folder / module.folder / "model.safetensors")
        weight = _tensor(file, "linear.weight", (module.outputs, module.inputs))
        bias = _tensor(file, "linear.bias", (module.outputs,)) if module.bias else None
        layers.append(DenseLayer(weight, bias, module.activation))
    return tuple(layers)


def _only(path: Path, fields: dict[str, Any], field: str, *supported: object) -> None:
    value = fields.get(field, supported[0])
    if value not in supported:
        raise UnsupportedModel(f"{path}: {field} {value!r} is not supported; supported: {supported[0]!r}")


def _tensor(file: SafetensorsFile, name: str, shape: tuple[int, ...]) -> Floats:
    if name not in file:
        raise BrokenModel(f"{file.path} has no tensor {name}")
    tensor = file.tensor(name)
    tensor.check(file.path, name, shape)
    return tensor.float32()
