"""Pooling and the modules after it: Dense (in late interaction on tokens too), LayerNorm, Normalize, Quantize.

Descriptions, read from sentence-transformers' files. Imports no numpy: the supervisor reads descriptions, and computes
nothing. `embedding` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.files.json_files import positive_int, read_object

# What a user may ask for, and what encoders compute by themselves: the first token's row, the mean, the maximum of each
# column, the last token's row.
POOLINGS = ("cls", "mean", "max", "last-token")

# sentence-transformers' name of a mode → ours.
MODES = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean",
    "lasttoken": "last-token",
}
# Its first five major versions write flags instead of a mode; several are joined in this order.
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class PoolingModule(NamedTuple):
    """The settings in the `config.json` of a Pooling module."""

    pooling: str  # the mode; several, whose rows are joined, have "+" between them
    include_prompt: bool  # whether a prompt's tokens are pooled


def modes_of(pooling: str) -> tuple[str, ...]:
    """The modes whose rows are joined, in their order."""
    return tuple(pooling.split("+"))


def read_pooling(path: Path, *, replaced: bool = False) -> PoolingModule:
    """Read the `config.json` of a Pooling module. Raises BrokenModel or UnsupportedModel.

    With `replaced` the user overrides the pooling, so the mode is not read.
    """
    fields = read_object(path)
    include_prompt = bool(fields.get("include_prompt", True))
    if replaced:
        return PoolingModule("", include_prompt)
    modes = fields.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in FLAGS.items() if fields.get(flag)] or ["mean"]
    elif isinstance(modes, str):
        modes = [modes]
    if not isinstance(modes, list) or not modes or not all(isinstance(mode, str) and mode in MODES for mode in modes):
        names = " + ".join(map(str, modes)) if isinstance(modes, list) else repr(modes)
        raise UnsupportedModel(
            f"{path}: pooling_mode {names or '[]'} is not supported; supported: {', '.join(MODES)}, or several of them "
            "in a list"
        )
    return PoolingModule("+".join(MODES[mode] for mode in modes), include_prompt)


# torch's class → our name. Dropout does nothing in inference.
ACTIVATION_CLASSES = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "Sigmoid": "sigmoid",
    "GELU": "gelu",
    "SiLU": "silu",
    "Dropout": "identity",
}
# Those that every encoder has, for layers of late interaction; the rest run on the host, after pooling.
PLAIN = ("identity", "tanh", "relu", "sigmoid", "gelu")


@dataclass(frozen=True, slots=True)
class Dense:
    """activation(x · weightᵀ + bias), and x or its projection added to that."""

    folder: str  # inside the model's folder; holds model.safetensors, unless `file` is another
    inputs: int  # columns in
    outputs: int  # columns out
    bias: bool
    activation: str  # a value of ACTIVATION_CLASSES
    residual: bool = False
    file: str = "model.safetensors"
    name: str = "linear"  # of the tensors, before ".weight"


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """torch's LayerNorm with its default epsilon."""

    folder: str  # inside the model's folder; holds model.safetensors
    columns: int


@dataclass(frozen=True, slots=True)
class Normalize:
    """Rows of length 1, before another module. At the end of a model a request decides."""


@dataclass(frozen=True, slots=True)
class Quantize:
    """Whole numbers of -127 to 127, the nearest to 127 · tanh(x): pplx-embed's module. It ends a model."""


Module = Dense | LayerNorm | Normalize | Quantize


def is_plain(module: Module) -> bool:
    """True if every encoder has a kernel for it."""
    return isinstance(module, Dense) and module.activation in PLAIN and not module.residual


def read_dense(folder: Path, name: str, *, input_name: str = "sentence_embedding") -> Dense:
    """Read the Dense module in the folder `name` of a model's `folder`. Raises BrokenModel or UnsupportedModel.

    `input_name` is sentence-transformers' name for the rows it takes: "sentence_embedding" or "token_embeddings".
    """
    path = folder / name / "config.json"
    fields = read_object(path)
    # sentence-transformers' own default is Tanh.
    activation = str(fields.get("activation_function") or "torch.nn.modules.activation.Tanh")
    kind = activation.rpartition(".")[2]
    on_tokens = input_name == "token_embeddings"
    supported = [class_name for class_name, ours in ACTIVATION_CLASSES.items() if ours in PLAIN or not on_tokens]
    if kind not in supported or not activation.startswith("torch.nn."):
        raise UnsupportedModel(
            f"{path}: activation_function {activation} is not supported; supported: {', '.join(supported)}"
        )
    if on_tokens:
        _only(path, fields, "use_residual", False)
    _only(path, fields, "module_input_name", input_name)
    _only(path, fields, "module_output_name", input_name, None)
    inputs, outputs = (_count(path, fields, field) for field in ("in_features", "out_features"))
    check_weights(folder, name, "MultiVectorEncoder" if on_tokens else "SentenceTransformer")
    return Dense(
        name,
        inputs,
        outputs,
        bool(fields.get("bias", True)),
        ACTIVATION_CLASSES[kind],
        bool(fields.get("use_residual", False)),
    )


def read_layer_norm(folder: Path, name: str) -> LayerNorm:
    """Read the LayerNorm module in the folder `name` of a model's `folder`. Raises BrokenModel or UnsupportedModel."""
    path = folder / name / "config.json"
    columns = _count(path, read_object(path), "dimension")
    check_weights(folder, name, "SentenceTransformer")
    return LayerNorm(name, columns)


def check_normalize(folder: Path, name: str) -> None:
    """Raise UnsupportedModel for a Normalize module that does not take and give a text's own row."""
    path = folder / name / "config.json"
    if not path.is_file():
        return
    fields = read_object(path)
    _only(path, fields, "module_input_name", "sentence_embedding")
    _only(path, fields, "module_output_name", "sentence_embedding", None)


def width_after(folder: Path, modules: Sequence[Module], width: int) -> int:
    """The columns of rows of `width` columns after these modules. Raises BrokenModel if they do not fit."""
    for module in modules:
        if isinstance(module, Normalize | Quantize):
            continue
        inputs, outputs = (
            (module.inputs, module.outputs) if isinstance(module, Dense) else (module.columns, module.columns)
        )
        if inputs != width:
            raise BrokenModel(f"{folder / module.folder} takes {inputs} columns, but its input has {width}")
        width = outputs
    return width


def _count(path: Path, fields: dict[str, Any], field: str) -> int:
    value = positive_int(path, fields, field)
    if value is None:
        raise BrokenModel(f"{path} has no {field}")
    return value


def check_weights(folder: Path, name: str, library: str) -> None:
    """Raise UnsupportedModel for a module of which only pickled weights are there, BrokenModel for one without any.

    `library` is the class of sentence-transformers that converts the model.
    """
    if (folder / name / "model.safetensors").is_file():
        return
    if (folder / name / "pytorch_model.bin").is_file():
        raise UnsupportedModel(
            f"{folder / name} has only pickled weights (pytorch_model.bin), which can run code when read and are "
            "refused; convert the model once with: pip install sentence-transformers && "
            'python -c "from sentence_transformers import '
            f"{library} as S; S('{folder}').save_pretrained('{folder}')\""
        )
    raise BrokenModel(f"{folder / name} has no model.safetensors")


def _only(path: Path, fields: dict[str, Any], field: str, *supported: object) -> None:
    value = fields.get(field, supported[0])
    if value not in supported:
        raise UnsupportedModel(f"{path}: {field} {value!r} is not supported; supported: {supported[0]!r}")
