"""What a Dense module's files say: a linear layer after pooling or on tokens, activation(x · weightᵀ + bias).

Imports no numpy: the supervisor reads descriptions, and computes nothing. `dense_layer` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.files.json_files import read_object

__all__ = ["Dense", "read_dense", "width_after"]

# torch's class → our name.
ACTIVATION_CLASSES = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "Sigmoid": "sigmoid"}


@dataclass(frozen=True, slots=True)
class Dense:
    """What a Dense module's `config.json` says."""

    folder: str  # inside the model's folder; holds model.safetensors
    inputs: int  # columns in
    outputs: int  # columns out
    bias: bool
    activation: str  # "identity", "tanh", "relu", "sigmoid"


def read_dense(folder: Path, name: str, *, of: str = "sentence_embedding") -> Dense:
    """Read the Dense module in the folder `name` of a model's `folder`. Raises BrokenModel or UnsupportedModel.

    `of` is sentence-transformers' name for the rows it takes: "sentence_embedding" or "token_embeddings".
    """
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
    _only(path, fields, "module_input_name", of)
    _only(path, fields, "module_output_name", of, None)
    inputs, outputs = fields.get("in_features"), fields.get("out_features")
    if not isinstance(inputs, int) or not isinstance(outputs, int) or min(inputs, outputs) < 1:
        raise BrokenModel(f"{path}: in_features and out_features must be positive ints, found {inputs!r}, {outputs!r}")
    if not (folder / name / "model.safetensors").is_file():
        if (folder / name / "pytorch_model.bin").is_file():
            library = "SentenceTransformer" if of == "sentence_embedding" else "MultiVectorEncoder"
            raise UnsupportedModel(
                f"{folder / name} has only pickled weights (pytorch_model.bin), which can run code when read and are "
                "refused; convert the model once with: pip install sentence-transformers && "
                'python -c "from sentence_transformers import '
                f"{library} as S; S('{folder}').save_pretrained('{folder}')\""
            )
        raise BrokenModel(f"{folder / name} has no model.safetensors")
    return Dense(name, inputs, outputs, bool(fields.get("bias", True)), ACTIVATION_CLASSES[kind])


def width_after(folder: Path, dense: tuple[Dense, ...], width: int) -> int:
    """The columns of rows of `width` columns after a model's Dense modules. Raises BrokenModel if they do not fit."""
    for layer in dense:
        if layer.inputs != width:
            raise BrokenModel(f"{folder / layer.folder} takes {layer.inputs} columns, but is given {width}")
        width = layer.outputs
    return width


def _only(path: Path, fields: dict[str, Any], field: str, *supported: object) -> None:
    value = fields.get(field, supported[0])
    if value not in supported:
        raise UnsupportedModel(f"{path}: {field} {value!r} is not supported; supported: {supported[0]!r}")
