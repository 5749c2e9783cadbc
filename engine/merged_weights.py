"""What a LoRA adapter makes of its base model's tensors, by the names under which the base stores them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from embert.engine.adapters import PEFT_PREFIX, LowRank
from embert.engine.architecture.tensor_names import TensorNames, spellings_of
from embert.engine.errors import BrokenModel
from embert.engine.files.safetensors_file import SafetensorsFile, Tensor
from embert.engine.lora import Lora

__all__ = ["MergedWeights"]

# Of a module's A and B, and of B's bias, after the module's name.
LINEAR = LINEAR_A, LINEAR_B = ".lora_A.weight", ".lora_B.weight"
TABLE = TABLE_A, TABLE_B = ".lora_embedding_A", ".lora_embedding_B"
BIAS = ".lora_B.bias"
BASE_LAYER = ".base_layer"  # between the name of a module with an adapter and those of its own tensors


class MergedWeights:
    """The tensors of an adapter's file, and what of the base's they change."""

    def __init__(self, lora: Lora, tensors: TensorNames, stored: Iterable[str]) -> None:
        """`stored` are the names of the base's tensors, `tensors` say which of them are layers'.

        Raises BrokenModel for a tensor of a module that `lora` does not name or the base does not have, if it is in a
        layer or adds to one.
        """
        self._lora, self._file = lora, SafetensorsFile(lora.weights)
        self._stored = frozenset(stored)
        self._prefixes = ("", *dict.fromkeys(prefix for scheme in tensors.schemes for prefix in scheme.prefixes))
        # The base's tensor → the module in the file whose A and B, or B's bias, add to it.
        self._linear: dict[str, str] = {}
        self._tables: dict[str, str] = {}
        self._biases: dict[str, str] = {}
        self._replaced: dict[str, str] = {}  # the base's tensor → the file's
        unused = [name for name in self._file.names if not self._place(name)]
        decoder = "" if tensors.masked_lm is None else f"{tensors.masked_lm.decoder}."
        for name in unused:
            own = name.removeprefix(PEFT_PREFIX)
            if tensors.layer_of(own) is not None or (decoder and own.startswith(decoder)):
                raise BrokenModel(f"{lora.weights} has a tensor {name}, which belongs to no weight of the base model")
        self.unused = tuple(unused)  # of modules that the base does not have

    def changes(self, name: str) -> bool:
        """Whether a tensor of the base is another one with the adapter."""
        return any(name in each for each in (self._linear, self._tables, self._biases, self._replaced))

    def merged(self, name: str, base: Tensor) -> Tensor:
        """A tensor of the base, by its stored name, with the adapter: in float32 where that adds to it.

        Raises BrokenModel for a tensor of another shape than the base's weight and the rank imply.
        """
        if name in self._replaced:
            base = self._read(self._replaced[name], base.shape)
        if name in self._biases:
            module = self._biases[name]
            added = self._read(module + BIAS, base.shape).float32() * np.float32(self._scale(module))
            return Tensor(base.float32() + added, "F32")
        if name in self._tables:
            module, (rows, columns) = self._tables[name], base.shape
            left = self._read(module + TABLE_A, (self._rank(module), rows)).float32().T
            right = self._read(module + TABLE_B, (columns, self._rank(module))).float32().T
        elif name in self._linear:
            module, (rows, columns) = self._linear[name], base.shape
            left = self._read(module + LINEAR_B, (rows, self._rank(module))).float32()
            right = self._read(module + LINEAR_A, (self._rank(module), columns)).float32()
        else:
            return base
        return LowRank(left[None], right[None]).added_to(base, 0, self._scale(module))

    def _rank(self, module: str) -> int:
        return self._lora.rank_of(module.removeprefix(PEFT_PREFIX))

    def _scale(self, module: str) -> float:
        return self._lora.scale_of(module.removeprefix(PEFT_PREFIX))

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._file:
            raise BrokenModel(f"{self._lora.weights} has no tensor {name}")
        tensor = self._file.tensor(name)
        if tensor.shape != shape:
            raise BrokenModel(
                f"{self._lora.weights}: {name} has shape {list(tensor.shape)}, the base model and the rank imply "
                f"{list(shape)}"
            )
        tensor.check(self._lora.weights, name, shape)
        return tensor

    def _place(self, name: str) -> bool:
        """Note what a tensor of the file changes; whether the base has that. Raises BrokenModel."""
        own = name.removeprefix(PEFT_PREFIX)
        ending = next((each for each in (*LINEAR, *TABLE, BIAS) if own.endswith(each)), None)
        if ending is None:
            found = self._in_base(own.replace(BASE_LAYER, ""))
            if found is not None:
                self._replaced[found] = name
            return found is not None
        module = own.removesuffix(ending)
        if not self._lora.adapts(module):
            raise BrokenModel(f"{self._lora.weights} has a tensor {name}, and {self._lora.path} adapts no {module}")
        found = self._in_base(f"{module}.{'bias' if ending == BIAS else 'weight'}")
        if found is not None:
            kind = self._biases if ending == BIAS else self._tables if ending in TABLE else self._linear
            kind[found] = name.removesuffix(ending)
        return found is not None

    def _in_base(self, name: str) -> str | None:
        """The base's name of a tensor that the adapter names, with or without the base's prefix."""
        bare = next((name.removeprefix(each) for each in self._prefixes if each and name.startswith(each)), name)
        for each in dict.fromkeys((name, *(prefix + bare for prefix in self._prefixes))):
            for spelling in spellings_of(each):
                if spelling in self._stored:
                    return spelling
        return None
