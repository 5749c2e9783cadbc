"""A LoRA adapter for a base model, as PEFT writes it: its config, and which weights of the base it changes.

Imports no numpy: the supervisor reads descriptions, and computes nothing. `merged_weights` does.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.files.json_files import check_keys, read_object
from embert.engine.files.key_tables import ADAPTER_CONFIG
from embert.engine.models.tensor_names import TensorNames, stored_names_of

if TYPE_CHECKING:
    from pydantic_core import SchemaValidator

NAME = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

# In the file of weights: before a module's name, and after it A and B, and B's bias.
PEFT_PREFIX = "base_model.model."
LINEAR = LINEAR_A, LINEAR_B = ".lora_A.weight", ".lora_B.weight"
TABLE = TABLE_A, TABLE_B = ".lora_embedding_A", ".lora_embedding_B"
BIAS = ".lora_B.bias"
# Between the name of a module and those of its tensors: its own where it has an adapter, those that are stored whole,
# and those that these replace.
BASE_LAYER, SAVED, ORIGINAL = ".base_layer", ".modules_to_save", ".original_module"


@dataclass(frozen=True, slots=True)
class Lora:
    """The settings of an adapter_config.json. Built by `read_lora`; picklable."""

    path: Path
    rank: int
    alpha: float
    rank_stabilized: bool
    base: str | None  # the name of the base model
    targets: str | tuple[str, ...] = ()  # a regular expression, or ends of modules' names
    excluded: str | tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None  # of `targets`, if not all
    layer_patterns: tuple[str, ...] = ()  # what stands before a layer's number
    ranks: Mapping[str, int] = field(default_factory=dict)  # by a pattern of modules' names
    alphas: Mapping[str, float] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    @property
    def weights(self) -> Path:
        return self.path.with_name(ADAPTER_WEIGHTS)

    def rank_of(self, module: str) -> int:
        """Columns of A·x for a module."""
        return self.ranks.get(_pattern(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        """Factor of B·A for a module."""
        rank, alpha = self.rank_of(module), self.alphas.get(_pattern(self.alphas, module), self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def adapts(self, module: str) -> bool:
        """True if PEFT gives a module an adapter: its `check_target_module_exists`."""
        if _matches_any(self.excluded, module):
            return False
        if self.targets == "all-linear":
            return True
        if not _matches_any(self.targets, module):
            return False
        if self.layers is None or isinstance(self.targets, str) or module in self.targets:
            return True
        starts = [rf"(?:.*\.)?(?:{pattern})" for pattern in self.layer_patterns] or [r".*\.[^.]*"]
        parts = module.split(".")
        numbers = [index for index, part in enumerate(parts[:-1]) if part.isdecimal()]
        found = (int(parts[index]) for start in starts for index in numbers if _matches(start, ".".join(parts[:index])))
        return next(found, None) in self.layers


def _matches_any(names: str | tuple[str, ...], module: str) -> bool:
    if isinstance(names, str):
        return _matches(names, module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _pattern(patterns: Mapping[str, object], module: str) -> str:
    return next((pattern for pattern in patterns if _matches(rf"(?:.*\.)?(?:{pattern})", module)), "")


def _matches(pattern: str, name: str) -> bool:
    """True if a pattern of the file describes the whole name."""
    return _compile(pattern).isinstance_python(name)


@functools.lru_cache
def _compile(pattern: str) -> SchemaValidator:
    """A regular expression that takes linear time whatever its pattern, unlike Python's own.

    Raises SchemaError for what is none, and for one that looks around.
    """
    from pydantic_core import SchemaValidator, core_schema

    return SchemaValidator(core_schema.str_schema(pattern=rf"^(?:{pattern})$", regex_engine="rust-regex"))


def read_lora(folder: Path) -> Lora | None:
    """The adapter in the `folder` of a transformer; None where there is none.

    Raises BrokenModel for a value of a wrong type and for a file that is missing, UnsupportedModel for another kind of
    adapter.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    fields = read_object(path)
    # What a file does not say is PEFT's default; the kind it must say.
    notices = check_keys(path, {"peft_type": None, **fields}, ADAPTER_CONFIG)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        if (folder / "adapter_model.bin").is_file():
            raise UnsupportedModel(
                f"{folder} has an adapter with only pickled weights (adapter_model.bin), which can run code when read "
                "and are refused; convert them once with: pip install torch safetensors && "
                f'cd {folder} && python -c "import torch; from safetensors.torch import save_file; '
                "save_file(torch.load('adapter_model.bin', map_location='cpu', weights_only=True), "
                f"'{ADAPTER_WEIGHTS}')\""
            )
        raise BrokenModel(f"{folder} has {NAME} and no {ADAPTER_WEIGHTS}")
    base = fields.get("base_model_name_or_path")
    layers = fields.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    if layers is not None and not (isinstance(layers, list) and all(type(layer) is int for layer in layers)):
        raise BrokenModel(f"{path}: layers_to_transform must be a list of ints, found {layers!r}")
    lora = Lora(
        path,
        rank=int(_number(path, "r", fields.get("r", 8), whole=True)),
        alpha=_number(path, "lora_alpha", fields.get("lora_alpha", 8)),
        rank_stabilized=bool(fields.get("use_rslora")),
        base=base if isinstance(base, str) and base else None,
        targets=_names(path, fields, "target_modules"),
        excluded=_names(path, fields, "exclude_modules"),
        layers=tuple(layers) if layers else None,
        layer_patterns=_as_tuple(_names(path, fields, "layers_pattern")),
        ranks={name: int(value) for name, value in _numbers(path, fields, "rank_pattern", whole=True).items()},
        alphas=_numbers(path, fields, "alpha_pattern"),
        notices=notices,
    )
    _check_patterns(lora)
    return lora


def _check_patterns(lora: Lora) -> None:
    """Raise BrokenModel for a pattern that is not a regular expression, UnsupportedModel for one that looks around."""
    from pydantic_core import SchemaError

    patterns = [value for value in (lora.targets, lora.excluded) if isinstance(value, str)]
    for pattern in (*patterns, *lora.layer_patterns, *lora.ranks, *lora.alphas):
        try:
            re.compile(pattern)
        except re.error as error:
            raise BrokenModel(f"{lora.path}: {pattern!r} is not a regular expression: {error}") from error
        try:
            _compile(pattern)
        except SchemaError as error:
            raise UnsupportedModel(
                f"{lora.path}: the regular expression {pattern!r} looks around, refers back or is too large, "
                "which is not supported"
            ) from error


def _names(path: Path, fields: Mapping[str, Any], name: str) -> str | tuple[str, ...]:
    value = fields.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BrokenModel(f"{path}: {name} must be a text or a list of texts, found {value!r}")
    return tuple(value)


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _number(path: Path, name: str, value: object, *, whole: bool = False) -> float:
    kinds: tuple[type, ...] = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:  # type: ignore[operator]
        raise BrokenModel(f"{path}: {name} must be a positive {'int' if whole else 'number'}, found {value!r}")
    return value  # type: ignore[return-value]


def _numbers(path: Path, fields: Mapping[str, Any], name: str, *, whole: bool = False) -> dict[str, float]:
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise BrokenModel(f"{path}: {name} must be an object, found {value!r}")
    return {pattern: _number(path, f"{name}.{pattern}", number, whole=whole) for pattern, number in value.items()}


@dataclass(frozen=True, slots=True)
class Placement:
    """Changes of an adapter's file to tensors, by the names under which the base stores its own."""

    # The base's tensor → the module in the file whose A and B, or B's bias, add to it.
    linear: dict[str, str] = field(default_factory=dict)
    tables: dict[str, str] = field(default_factory=dict)
    biases: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)  # the base's tensor → the file's
    unused: list[str] = field(default_factory=list)  # the file's tensors of modules that the base does not have


def place_tensors(lora: Lora, names: Iterable[str], tensors: TensorNames, stored: Collection[str]) -> Placement:
    """Find the target of each tensor of the adapter's file: `names`. `stored` are the names of the base's tensors.

    `tensors` say which of them are layers'. Raises BrokenModel for a tensor of a module that `lora` does not name, or
    that the base does not have although it is in a layer or the decoder.
    """
    placement = Placement()
    prefixes = tuple(dict.fromkeys(prefix for mapping in tensors.mappings for prefix in mapping.prefixes))
    for name in names:
        own = name.removeprefix(PEFT_PREFIX)
        if ORIGINAL in own:
            continue
        ending = next((suffix for suffix in (*LINEAR, *TABLE, BIAS) if own.endswith(suffix)), "")
        module = own.removesuffix(ending)
        if ending and not lora.adapts(module):
            raise BrokenModel(f"{lora.weights} has a tensor {name}, and {lora.path} adapts no {module}")
        target = own.replace(BASE_LAYER, "").replace(SAVED, "")
        if ending:
            target = f"{module}.{'bias' if ending == BIAS else 'weight'}"
        in_base = _in_base(target, prefixes, stored)
        if in_base is None:
            decoder = tensors.masked_lm is not None and own.startswith(f"{tensors.masked_lm.decoder}.")
            if decoder or tensors.layer_of(own) is not None:
                raise BrokenModel(f"{lora.weights} has a tensor {name}, which belongs to no weight of the base model")
            placement.unused.append(name)
        elif ending:
            kind = placement.biases if ending == BIAS else placement.tables if ending in TABLE else placement.linear
            kind[in_base] = name.removesuffix(ending)
        else:
            placement.replaced[in_base] = name
    return placement


def _in_base(name: str, prefixes: tuple[str, ...], stored: Collection[str]) -> str | None:
    """The base's name of a tensor that the adapter names, with or without the base's prefix."""
    bare = next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)
    for candidate in dict.fromkeys((name, bare, *(prefix + bare for prefix in prefixes))):
        for stored_name in stored_names_of(candidate):
            if stored_name in stored:
                return stored_name
    return None
