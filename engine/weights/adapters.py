"""Low-rank additions of adapters to the encoder's weights, from the two kinds of files that store them.

An adapter adds scale · left · right to a weight of [rows, columns], where left is [rows, rank] and right is
[rank, columns]. Of a linear layer right is what LoRA calls A, and left is B; of a table they change places.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embert.engine.errors import BrokenModel
from embert.engine.files.safetensors_file import SafetensorsFile, Tensor
from embert.engine.lora import ADAPTER_WEIGHTS, PEFT_PREFIX
from embert.engine.models.encoder_config import Adapters
from embert.engine.models.tensor_names import TABLES, StoredName, TensorNames

Floats = npt.NDArray[np.float32]

ORIGINAL = ".original"  # torch's suffix for a weight with a parametrization
# Of a weight at a time: they stay in the cache, and so small a product is not worth numpy's threads.
MERGED_ELEMENTS = 1 << 16


class LowRank(NamedTuple):
    """Additions of n adapters to one weight, before the scale."""

    left: Floats  # [n, rows, rank]
    right: Floats  # [n, rank, columns]

    def add_to(self, weight: Tensor, number: int, scale: float) -> Tensor:
        """A weight [rows, columns] with what one adapter adds to it: a copy in float32.

        Some rows at a time, which takes no memory in addition to the copy.
        """
        left, right = self.left[number] * np.float32(scale), self.right[number]
        merged = np.empty(weight.shape, np.float32)
        count = max(1, MERGED_ELEMENTS // merged.shape[1])
        for start in range(0, len(merged), count):
            rows = slice(start, start + count)
            np.matmul(left[rows], right, out=merged[rows])
            merged[rows] += Tensor(weight.array[rows], weight.dtype).float32()
        return Tensor(merged, "F32")


def additions_to_weight(
    path: Path,
    files: Mapping[str, SafetensorsFile],
    name: str,
    shape: tuple[int, ...],
    stored_name: StoredName,
    adapters: Adapters,
) -> tuple[LowRank | None, set[str]]:
    """Additions of all adapters to a weight, from two tensors next to it, and the names of these.

    `name` and `shape` are the weight's; `stored_name` is its name in one of `files`. Raises BrokenModel.
    """
    if not stored_name.name.endswith(ORIGINAL):
        return None, set()
    names = [f"{stored_name.name.removesuffix(ORIGINAL)}.0.{kind}" for kind in ("lora_A", "lora_B")]
    left, right = names if name in TABLES else reversed(names)
    n, rank, (rows, columns) = len(adapters.names), adapters.rank, shape
    read = {}
    for stored, expected_shape in ((left, (n, rows * stored_name.parts, rank)), (right, (n, rank, columns))):
        if stored not in files:
            raise BrokenModel(f"{path} has no tensor {stored}")
        read[stored] = files[stored].tensor(stored)
        read[stored].check(path, stored, expected_shape)
    own = slice(stored_name.part * rows, (stored_name.part + 1) * rows)
    return LowRank(read[left].float32()[:, own], read[right].float32()), {left, right}


class PeftFiles:
    """Adapters in separate files, as PEFT writes them."""

    def __init__(self, folder: Path, tensors: TensorNames, adapters: Adapters) -> None:
        """`folder` holds the adapters' folders. Raises BrokenModel."""
        self._names, self._rank = tensors, adapters.rank
        self._files = [SafetensorsFile(folder / subfolder / ADAPTER_WEIGHTS) for subfolder in adapters.folders]
        self._unused = [{*file.names} for file in self._files]

    def low_rank(self, name: str, shape: tuple[int, ...]) -> LowRank | None:
        """Additions of the adapters to a weight; None where there are none. Raises BrokenModel."""
        low_ranks = [self._of_one(number, name, shape) for number in range(len(self._files))]
        if not any(low_ranks):
            return None
        (rows, columns), rank = shape, self._rank
        nothing = np.zeros((rows, rank), np.float32), np.zeros((rank, columns), np.float32)
        lefts, rights = zip(*(low_rank or nothing for low_rank in low_ranks), strict=True)
        return LowRank(np.stack(lefts), np.stack(rights))

    def _of_one(self, number: int, name: str, shape: tuple[int, ...]) -> tuple[Floats, Floats] | None:
        file, (rows, columns), rank = self._files[number], shape, self._rank
        kinds = ("lora_embedding_A", "lora_embedding_B") if name in TABLES else ("lora_B.weight", "lora_A.weight")
        for stored, part, parts in self._names.stored_names(name):
            for prefix in (PEFT_PREFIX, ""):
                left, right = (prefix + stored.removesuffix("weight") + kind for kind in kinds)
                if left not in file or right not in file:
                    continue
                self._unused[number] -= {left, right}
                of_rows, of_columns = file.tensor(left), file.tensor(right)
                of_rows.check(file.path, left, (rank, rows) if name in TABLES else (rows * parts, rank))
                of_columns.check(file.path, right, (columns, rank) if name in TABLES else (rank, columns))
                if name in TABLES:
                    return of_rows.float32().T, of_columns.float32().T
                return of_rows.float32()[part * rows : (part + 1) * rows], of_columns.float32()
        return None

    def check_surplus(self) -> None:
        """Raise BrokenModel for a layer's tensor that was not asked for: it would change the vectors."""
        for file, names in zip(self._files, self._unused, strict=True):
            for name in sorted(names):
                if self._names.layer_of(name.removeprefix(PEFT_PREFIX)) is not None:
                    raise BrokenModel(f"{file.path} has a tensor {name}, which belongs to no weight of the model")
