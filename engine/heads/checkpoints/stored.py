"""The contents of a model folder's files: tensors and their shapes, which of them nothing uses, and the ids of tokens.

Imports no numpy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embert.engine.errors import BrokenModel
from embert.engine.files.json_files import inside, read_object
from embert.engine.files.safetensors_header import read_header
from embert.engine.heads.description import Heads, LabelDecider, Layer, Norm, Splade
from embert.engine.models.encoder_config import EncoderConfig, tensor_shapes
from embert.engine.models.tensor_names import stored_names_of


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The tensors of one safetensors file, or of several with an index."""

    path: Path  # the file or the index, for messages
    files: dict[str, Path]  # a tensor's name → the file that holds it
    shapes: dict[str, tuple[int, ...]]

    def find_name(self, names: Sequence[str]) -> str:
        """The first of a layer's or a norm's names that has a weight; else the first."""
        return next((name for name in names if f"{name}.weight" in self.shapes), names[0])

    def check(self, name: str, shape: tuple[int, ...]) -> str:
        """The name itself. Raises BrokenModel if the tensor is missing or has another shape."""
        if name not in self.shapes:
            raise BrokenModel(f"{self.path} has no tensor {name}")
        if self.shapes[name] != shape:
            actual = list(self.shapes[name])
            raise BrokenModel(f"{self.path}: {name} has shape {actual}, config.json implies {list(shape)}")
        return name


def stored_tensors(folder: Path) -> StoredTensors:
    """The tensors of model.safetensors, or of the files that its index names. Raises BrokenModel."""
    path = folder / "model.safetensors"
    if path.is_file():
        return tensors_in(path)
    path = folder / "model.safetensors.index.json"
    shards = read_object(path).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise BrokenModel(f"{path} has no weight_map from tensor names to files")
    shard_files = {shard: tensors_in(inside(path, shard)) for shard in sorted(set(shards.values()))}
    for name, shard in shards.items():
        if name not in shard_files[shard].shapes:
            raise BrokenModel(f"{folder / shard} has no tensor {name}, which {path.name} says it has")
    return StoredTensors(
        path,
        {name: folder / shard for name, shard in shards.items()},
        {name: shard_files[shard].shapes[name] for name, shard in shards.items()},
    )


def tensors_in(path: Path) -> StoredTensors:
    """The tensors of one file. Raises BrokenModel."""
    header = read_header(path)
    return StoredTensors(
        path, dict.fromkeys(header, path), {name: tuple(entry["shape"]) for name, entry in header.items()}
    )


def check_layer(stored: StoredTensors, layer: Layer) -> None:
    """Raise BrokenModel where a tensor of a head's layer is missing, or of another shape."""
    stored.check(f"{layer.name}.weight", (layer.outputs, layer.inputs))
    if layer.bias:
        stored.check(f"{layer.name}.bias", (layer.outputs,))
    if layer.norm is not None:
        check_norm(stored, layer.norm, layer.outputs)


def check_norm(stored: StoredTensors, norm: Norm, columns: int) -> None:
    """Raise BrokenModel where a tensor of a head's norm is missing, or of another shape."""
    for part in ("weight", "bias") if norm.bias else ("weight",):
        stored_names = stored_names_of(f"{norm.name}.{part}")
        stored.check(next((name for name in stored_names if name in stored.shapes), stored_names[0]), (columns,))


MOST_GROUPS, MOST_CHARACTERS = 8, 60  # of a message, and of a name in it

# Buffers that follow from config.json, by the ends of their names.
BUFFERS = ("position_ids", "token_type_ids", "inv_freq")
ADDED = (".0.lora_A", ".0.lora_B")  # of adapters, next to the weights to which they add


def unused_tensors(stored: StoredTensors, config: EncoderConfig, heads: Heads) -> list[str]:
    """The stored names of tensors that neither the encoder nor its `heads` read.

    Poolers do not count: HuggingFace's plain models have them too, and pooled hidden states do without.
    """
    used = {*_of_heads(heads)}
    for name in tensor_shapes(config):
        stored_names = config.tensors.stored_names(name)
        used |= {next((stored_name.name for stored_name in stored_names if stored_name.name in stored.shapes), "")}
    masked_lm = config.tensors.masked_lm
    if masked_lm is not None and isinstance(heads.sparse, Splade):
        # The word table and the decoder may be one, and so may two names of its bias.
        used |= {f"{masked_lm.decoder}.weight", *masked_lm.biases}
    return [name for name in stored.shapes if name not in used and not _says_nothing(name)]


def format_groups(names: Iterable[str], config: EncoderConfig) -> str:
    """The names by their first part, with the number of each: "classifier (2), lm_head (5)". At most MOST_GROUPS."""
    prefixes = {prefix for mapping in config.tensors.mappings for prefix in mapping.prefixes}
    groups = Counter(_first_part(name, prefixes) for name in names)
    parts = [f"{_short(group)} ({count})" for group, count in groups.most_common(MOST_GROUPS)]
    more = len(groups) - len(parts)
    return ", ".join(parts) + (f" and {more} more" if more else "")


def _first_part(name: str, prefixes: set[str]) -> str:
    prefix = next((candidate for candidate in prefixes if name.startswith(candidate)), "")
    return prefix + name.removeprefix(prefix).partition(".")[0]


def _short(name: str) -> str:
    return name if len(name) <= MOST_CHARACTERS else name[:MOST_CHARACTERS] + "…"


def _says_nothing(name: str) -> bool:
    return name.endswith(BUFFERS + ADDED) or "pooler" in name.split(".")[:2]


def _of_heads(heads: Heads) -> Iterator[str]:
    layers: list[Layer] = []
    if heads.classifier is not None:
        layers += heads.classifier.layers
    if heads.token_classifier is not None:
        layers += heads.token_classifier.layers
    if isinstance(heads.decider, LabelDecider):
        layers.append(heads.decider.vocabulary)
    if heads.multi_vector is not None:
        layers += heads.multi_vector.layers
    if isinstance(heads.sparse, Splade):
        layers.append(heads.sparse.transform)
        yield from _of_norm(heads.sparse.norm)
        yield from (heads.sparse.decoder, heads.sparse.bias)
    for layer in layers:
        yield from (f"{layer.name}.weight", f"{layer.name}.bias")
        if layer.norm is not None:
            yield from _of_norm(layer.norm)


def _of_norm(norm: Norm) -> Iterator[str]:
    for part in ("weight", "bias"):
        yield from stored_names_of(f"{norm.name}.{part}")


class Vocabulary:
    """A tokenizer's tokens and their ids, and which of them are special: read from its JSON files."""

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer.json of a `folder`, and the special tokens in the files next to it. Raises BrokenModel."""
        self.path = folder / "tokenizer.json"
        fields = read_object(self.path)
        try:
            stored = fields["model"]["vocab"]  # a list of [token, score] in a Unigram model
            self._ids = stored if isinstance(stored, dict) else {token: i for i, (token, _) in enumerate(stored)}
            self._ids = {**self._ids, **{entry["content"]: entry["id"] for entry in fields.get("added_tokens") or []}}
            valid = all(type(i) is int for i in self._ids.values())
        except (KeyError, TypeError, ValueError):
            valid = False
        if not valid:
            raise BrokenModel(f"{self.path} has no vocabulary that can be read")
        self._special: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                self._special |= read_object(folder / name)

    def id(self, token: str) -> int | None:
        """A token's id; None for text that is not a token."""
        token_id: int | None = self._ids.get(token)
        return token_id

    def ids(self, tokens: Iterable[str]) -> tuple[int, ...]:
        """The ids of those that are tokens, ascending."""
        return tuple(sorted({i for token in tokens if (i := self.id(token)) is not None}))

    def special(self, kind: str) -> str | None:
        """The special token that the files call "mask_token", "cls_token" or so; None where they name none."""
        value = self._special.get(kind)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else None
