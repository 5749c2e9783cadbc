"""Merges a LoRA adapter into its base model's tensors, by the base's stored names."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from embert.engine.errors import BrokenModel
from embert.engine.files.safetensors_file import SafetensorsFile, Tensor
from embert.engine.lora import BIAS, LINEAR_A, LINEAR_B, PEFT_PREFIX, TABLE_A, TABLE_B, Lora, placed
from embert.engine.models.tensor_names import TensorNames
from embert.engine.weights.adapters import LowRank

__all__ = ["MergedWeights"]


class MergedWeights:
    """The tensors of an adapter's file, and the tensors of the base that they change."""

    def __init__(self, lora: Lora, tensors: TensorNames, stored: Collection[str]) -> None:
        """`stored` are the names of the base's tensors, `tensors` say which of them are layers'.

        Raises BrokenModel for a tensor of a module that `lora` does not name or the base does not have, if it is in a
        layer or adds to one.
        """
        self._lora, self._file = lora, SafetensorsFile(lora.weights)
        self._placed = placed(lora, self._file.names, tensors, stored)

    def changes(self, name: str) -> bool:
        """Whether the adapter changes a tensor of the base."""
        own = self._placed
        return any(name in names for names in (own.linear, own.tables, own.biases, own.replaced))

    def merged(self, name: str, base: Tensor) -> Tensor:
        """A tensor of the base, by its stored name, with the adapter: in float32 where that adds to it.

        Raises BrokenModel for a tensor of another shape than the base's weight and the rank imply.
        """
        if name in self._placed.replaced:
            base = self._read(self._placed.replaced[name], base.shape)
        if name in self._placed.biases:
            module = self._placed.biases[name]
            added = self._read(module + BIAS, base.shape).float32() * np.float32(self._scale(module))
            return Tensor(base.float32() + added, "F32")
        if name in self._placed.tables:
            module, (rows, columns) = self._placed.tables[name], base.shape
            left = self._read(module + TABLE_A, (self._rank(module), rows)).float32().T
            right = self._read(module + TABLE_B, (columns, self._rank(module))).float32().T
        elif name in self._placed.linear:
            module, (rows, columns) = self._placed.linear[name], base.shape
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
