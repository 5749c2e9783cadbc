"""The JSON files that sentence-transformers puts beside a model: modules.json, 1_Pooling, 2_Dense, prompts.

Both the files of its first five major versions and those of version 6 are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.json_files import read_json, read_object

__all__ = ["Dense", "Modules", "read_modules", "read_prompts"]

# sentence-transformers' name → ours. Its other modes (mean_sqrt_len_tokens, weightedmean) are rare and not built.
POOLING_MODES = {"cls": "cls", "max": "max", "mean": "mean", "lasttoken": "last-token"}
POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
DENSE_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "Sigmoid": "sigmoid"}


@dataclass(frozen=True, slots=True)
class Dense:
    """A layer after pooling: activation(x · weightᵀ + bias)."""

    folder: str  # inside the model's folder; holds model.safetensors
    inputs: int
    outputs: int
    bias: bool
    activation: str  # "identity", "tanh", "relu", "sigmoid"


@dataclass(frozen=True, slots=True)
class Modules:
    """What modules.json and the files it names say."""

    transformer: str = ""  # folder of the transformer inside the model's folder
    max_length: int | None = None  # tokens
    lowercase: bool = False
    pooling: str | None = None
    dense: tuple[Dense, ...] = ()
    normalize: bool = False


def read_modules(folder: Path, *, pooling: str | None = None) -> Modules | None:
    """Read modules.json and what it points to; None when there is none. `pooling` replaces what 1_Pooling says.

    Raises UnsupportedModel for modules other than Transformer, Pooling, Dense …, Normalize in this order.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    listed = read_json(path)
    if not isinstance(listed, list) or not all(
        isinstance(module, dict) and isinstance(module.get("type"), str) and isinstance(module.get("path"), str)
        for module in listed
    ):
        raise BrokenModel(f"{path} must list objects with a type and a path")

    transformer, normalize = "", False
    dense: list[Dense] = []
    previous = ""
    for module in listed:
        # sentence_transformers.models.Pooling up to version 5, sentence_transformers.….pooling.Pooling since.
        kind = module["type"].rpartition(".")[2]
        if not module["type"].startswith("sentence_transformers.") or previous not in FOLLOWS.get(kind, ()):
            raise UnsupportedModel(
                f"{path}: module {module['type']} {f'after {previous} ' if previous else 'first '}is not supported; "
                "supported: Transformer, Pooling, then any number of Dense, then Normalize"
            )
        if kind == "Transformer":
            transformer = module["path"]
        elif kind == "Pooling":
            pooling = pooling or _pooling(folder / module["path"] / "config.json")
        elif kind == "Dense":
            dense.append(_dense(folder, module["path"]))
        else:
            normalize = True
        previous = kind
    max_length, lowercase = _transformer(folder / transformer)
    return Modules(transformer, max_length, lowercase, pooling, tuple(dense), normalize)


# Which module may come after which; "" is the beginning.
FOLLOWS = {
    "Transformer": ("",),
    "Pooling": ("Transformer",),
    "Dense": ("Pooling", "Dense"),
    "Normalize": ("Pooling", "Dense"),
}


def read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Prompts by name, and the name of the one used when a request names none."""
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}, None
    fields = read_object(path)
    prompts = fields.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise BrokenModel(f"{path}: prompts must map names to texts")
    default = fields.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise BrokenModel(f"{path}: default_prompt_name {default!r} is not among the prompts: {', '.join(prompts)}")
    return prompts, default


def _transformer(folder: Path) -> tuple[int | None, bool]:
    path = folder / "sentence_bert_config.json"
    if not path.is_file():
        return None, False
    fields = read_object(path)
    length = fields.get("max_seq_length")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length <= 0):
        raise BrokenModel(f"{path}: max_seq_length must be a positive int, found {length!r}")
    return length, bool(fields.get("do_lower_case", False))


def _pooling(path: Path) -> str:
    fields = read_object(path)
    modes = fields.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in POOLING_FLAGS.items() if fields.get(flag)] or ["mean"]
    elif isinstance(modes, str):
        modes = [modes]
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in POOLING_MODES:
        named = " + ".join(map(str, modes)) if isinstance(modes, list) else repr(modes)
        raise UnsupportedModel(
            f"{path}: pooling {named} is not supported; supported: one of {', '.join(POOLING_MODES)} "
            "(or state the pooling yourself)"
        )
    if not fields.get("include_prompt", True):
        raise UnsupportedModel(f"{path}: include_prompt false is not supported; supported: true")
    return POOLING_MODES[modes[0]]


def _dense(folder: Path, name: str) -> Dense:
    path = folder / name / "config.json"
    fields = read_object(path)
    # ST's own default is Tanh.
    activation = str(fields.get("activation_function") or "torch.nn.modules.activation.Tanh")
    kind = activation.rpartition(".")[2]
    if kind not in DENSE_ACTIVATIONS or not activation.startswith("torch.nn."):
        raise UnsupportedModel(
            f"{path}: activation_function {activation} is not supported; supported: {', '.join(DENSE_ACTIVATIONS)}"
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
    return Dense(name, inputs, outputs, bool(fields.get("bias", True)), DENSE_ACTIVATIONS[kind])


def _only(path: Path, fields: dict[str, Any], field: str, *supported: object) -> None:
    value = fields.get(field, supported[0])
    if value not in supported:
        raise UnsupportedModel(f"{path}: {field} {value!r} is not supported; supported: {supported[0]!r}")
