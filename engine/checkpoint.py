"""An encoder's weights by name, from one safetensors file or several. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embert.engine.errors import BrokenModel
from embert.engine.families.tensor_names import POSITION_EMBEDDINGS
from embert.engine.families.tensor_shapes import tensor_shapes
from embert.engine.files.json_files import read_object
from embert.engine.files.safetensors_file import SafetensorsFile, Tensor
from embert.engine.model import Model

__all__ = ["PADDING_POSITION", "Checkpoint"]

# The padding token's row of the position table: [1, hidden]. Present where the architecture has a padding_id.
PADDING_POSITION = "the padding token's row of " + POSITION_EMBEDDINGS


class Checkpoint:
    """The tensors of `tensor_shapes`, under the same names, checked by shape and dtype. Nothing is copied at first."""

    def __init__(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        self._tensors = tensors
        self.path = path  # the file or the index, for messages

    @classmethod
    def open(cls, model: Model) -> Checkpoint:
        """Map a model's weights and check them. Raises BrokenModel naming the file, the tensor and what is wrong."""
        path, stored = _stored(model.transformer_folder)
        tensors: dict[str, Tensor] = {}
        architecture = model.architecture
        for name, wanted in tensor_shapes(architecture).items():
            if name in architecture.tensors.absent:
                tensors[name] = Tensor(np.zeros(wanted, np.float32), "F32")
                continue
            skipped = architecture.first_position if name == POSITION_EMBEDDINGS else 0
            expected = (wanted[0] + skipped, *wanted[1:])
            spellings = architecture.tensors.spellings(name)
            tensor = next((stored[n].tensor(n) for n in spellings if n in stored), None)
            if tensor is None:
                raise BrokenModel(f"{path} has no tensor {spellings[0]}")
            tensor.check(path, spellings[0], expected)
            tensors[name] = Tensor(tensor.array[skipped:], tensor.dtype)
            if name == POSITION_EMBEDDINGS and architecture.padding_id is not None:
                tensors[PADDING_POSITION] = Tensor(tensor.array[skipped - 1 : skipped], tensor.dtype)
        return cls(tensors, path)

    def stored(self, name: str) -> Tensor:
        """A tensor as it is stored, with its dtype tag."""
        return self._tensors[name]

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor in float32: a view of the mapped file where it is stored so, else a converted copy."""
        return self._tensors[name].float32()


def _stored(folder: Path) -> tuple[Path, dict[str, SafetensorsFile]]:
    """Every stored tensor name and the file that holds it."""
    path = folder / "model.safetensors"
    if path.is_file():
        file = SafetensorsFile(path)
        return path, dict.fromkeys(file.names, file)
    path = folder / "model.safetensors.index.json"
    shards = read_object(path).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise BrokenModel(f"{path} has no weight_map from tensor names to files")
    files = {}
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard:
            raise BrokenModel(f"{path} names the file {shard}, which is not in its folder")
        files[shard] = SafetensorsFile(folder / shard)
    for name, shard in shards.items():
        if name not in files[shard]:
            raise BrokenModel(f"{folder / shard} has no tensor {name}, which {path.name} says it has")
    return path, {name: files[shard] for name, shard in shards.items()}
