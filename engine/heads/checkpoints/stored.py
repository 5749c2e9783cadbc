"""Which tensors a folder's weight files hold, and their shapes, from the files' headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from embert.engine.errors import BrokenModel
from embert.engine.files.json_files import read_object
from embert.engine.files.safetensors_header import read_header
from embert.engine.heads.description import Layer, Norm
from embert.engine.models.tensor_names import stored_names_of

__all__ = ["Stored", "check_layer", "check_norm", "stored_in", "stored_tensors"]


@dataclass(frozen=True, slots=True)
class Stored:
    """The tensors of one safetensors file, or of several with an index."""

    path: Path  # the file or the index, for messages
    files: dict[str, Path]  # a tensor's name → the file that holds it
    shapes: dict[str, tuple[int, ...]]

    def named(self, names: Sequence[str]) -> str:
        """The first of a layer's or a norm's names that has a weight; else the first."""
        return next((name for name in names if f"{name}.weight" in self.shapes), names[0])

    def check(self, name: str, shape: tuple[int, ...]) -> str:
        """The name itself. Raises BrokenModel if there is no such tensor, or one of another shape."""
        if name not in self.shapes:
            raise BrokenModel(f"{self.path} has no tensor {name}")
        if self.shapes[name] != shape:
            actual = list(self.shapes[name])
            raise BrokenModel(f"{self.path}: {name} has shape {actual}, config.json implies {list(shape)}")
        return name


def stored_tensors(folder: Path) -> Stored:
    """The tensors of model.safetensors, or of the files that its index names. Raises BrokenModel."""
    path = folder / "model.safetensors"
    if path.is_file():
        return stored_in(path)
    path = folder / "model.safetensors.index.json"
    shards = read_object(path).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise BrokenModel(f"{path} has no weight_map from tensor names to files")
    held: dict[str, Stored] = {}
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard:
            raise BrokenModel(f"{path} names the file {shard}, which is not in its folder")
        held[shard] = stored_in(folder / shard)
    for name, shard in shards.items():
        if name not in held[shard].shapes:
            raise BrokenModel(f"{folder / shard} has no tensor {name}, which {path.name} says it has")
    return Stored(
        path,
        {name: folder / shard for name, shard in shards.items()},
        {name: held[shard].shapes[name] for name, shard in shards.items()},
    )


def stored_in(path: Path) -> Stored:
    """The tensors of one file. Raises BrokenModel."""
    header = read_header(path)
    return Stored(path, dict.fromkeys(header, path), {name: tuple(entry["shape"]) for name, entry in header.items()})


def check_layer(stored: Stored, layer: Layer) -> None:
    """Raise BrokenModel where a tensor of a head's layer is missing, or of another shape."""
    stored.check(f"{layer.name}.weight", (layer.outputs, layer.inputs))
    if layer.bias:
        stored.check(f"{layer.name}.bias", (layer.outputs,))
    if layer.norm is not None:
        check_norm(stored, layer.norm, layer.outputs)


def check_norm(stored: Stored, norm: Norm, columns: int) -> None:
    """Raise BrokenModel where a tensor of a head's norm is missing, or of another shape."""
    for part in ("weight", "bias") if norm.bias else ("weight",):
        stored_names = stored_names_of(f"{norm.name}.{part}")
        stored.check(next((name for name in stored_names if name in stored.shapes), stored_names[0]), (columns,))
