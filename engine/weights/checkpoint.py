"""An encoder's weights by name, from one safetensors file or several, with a LoRA adapter merged in. Needs no torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embert.engine.errors import BrokenModel
from embert.engine.files.json_files import read_object
from embert.engine.files.safetensors_file import SafetensorsFile, Tensor
from embert.engine.heads.checkpoints.stored import stored_tensors
from embert.engine.heads.description import Layer, Norm
from embert.engine.lora import BIAS, LINEAR_A, LINEAR_B, PEFT_PREFIX, TABLE_A, TABLE_B, Lora, place_tensors
from embert.engine.model import Model
from embert.engine.models.encoder_config import EncoderConfig, tensor_shapes
from embert.engine.models.tensor_names import (
    POSITION_EMBEDDINGS,
    WORD_EMBEDDINGS,
    StoredName,
    TensorNames,
    stored_names_of,
)
from embert.engine.weights.adapters import LowRank, PeftFiles, additions_to_weight

Floats = npt.NDArray[np.float32]

# Gets the bytes of the encoder's weights that have been read, and how many there are, while an encoder of this context
# loads. A variable of the context, because a third-party encoder's factory takes no such argument.
on_bytes_read: ContextVar[Callable[[int, int], None] | None] = ContextVar("on_bytes_read", default=None)


class MergedWeights:
    """The tensors of an adapter's file, and the tensors of the base that they change."""

    def __init__(self, lora: Lora, tensors: TensorNames, stored: Collection[str]) -> None:
        """`stored` are the names of the base's tensors, `tensors` say which of them are layers'.

        Raises BrokenModel for a tensor of a module that `lora` does not name or the base does not have, if it is in a
        layer or adds to one.
        """
        self._lora, self._file = lora, SafetensorsFile(lora.weights)
        self._placement = place_tensors(lora, self._file.names, tensors, stored)

    def changes(self, name: str) -> bool:
        """True if the adapter changes a tensor of the base."""
        own = self._placement
        return any(name in names for names in (own.linear, own.tables, own.biases, own.replaced))

    def merge(self, name: str, base: Tensor) -> Tensor:
        """A tensor of the base, by its stored name, with the adapter: in float32 where that adds to it.

        Raises BrokenModel for a tensor of another shape than the base's weight and the rank imply.
        """
        if name in self._placement.replaced:
            base = self._read(self._placement.replaced[name], base.shape)
        if name in self._placement.biases:
            module = self._placement.biases[name]
            added = self._read(module + BIAS, base.shape).float32() * np.float32(self._scale(module))
            return Tensor(base.float32() + added, "F32")
        if name in self._placement.tables:
            module, (rows, columns) = self._placement.tables[name], base.shape
            left = self._read(module + TABLE_A, (self._rank(module), rows)).float32().T
            right = self._read(module + TABLE_B, (columns, self._rank(module))).float32().T
        elif name in self._placement.linear:
            module, (rows, columns) = self._placement.linear[name], base.shape
            left = self._read(module + LINEAR_B, (rows, self._rank(module))).float32()
            right = self._read(module + LINEAR_A, (self._rank(module), columns)).float32()
        else:
            return base
        return LowRank(left[None], right[None]).add_to(base, 0, self._scale(module))

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


# What some checkpoints store with a layer though it follows from config.json: rotary positions' frequencies.
COMPUTED = "rotary_emb.inv_freq"

# The padding token's row of the position table: [1, hidden]. Present where the architecture has a padding_id.
PADDING_POSITION = "the padding token's row of " + POSITION_EMBEDDINGS


class _Reading:
    """Progress of reading the encoder's tensors: reported to `on_bytes_read`, and unmapped after HELD_BYTES."""

    HELD_BYTES = 1 << 28

    def __init__(self, sizes: Mapping[str, int], files: Collection[SafetensorsFile]) -> None:
        """`sizes` are the tensors' bytes in these files, by name."""
        self._sizes, self._files = sizes, files
        self._left = set(sizes)  # not read yet
        self._whole = sum(sizes.values())
        self._read = self._held = 0
        self._report = on_bytes_read.get()

    def note(self, name: str) -> None:
        """Note that a tensor is about to be read. Pages that were read before may be unmapped."""
        size = self._sizes.get(name, 0)
        self._held += size
        if self._held > self.HELD_BYTES:
            self._held = size
            for file in self._files:
                file.release()
        if name in self._left:
            self._left.discard(name)
            self._read += size
            if self._report is not None:
                self._report(self._read, self._whole)


class Checkpoint:
    """The tensors of `tensor_shapes`, under the same names, checked by shape and dtype, and heads' tensors.

    Nothing is copied at first, and what has been read does not stay in memory: a model of many gigabytes passes through
    the host in parts.
    """

    def __init__(self, folder: Path, path: Path, files: Mapping[str, SafetensorsFile]) -> None:
        self._folder = folder  # the model's
        self._files = files  # every stored name and the file that holds it
        self._tensors: dict[str, Tensor] = {}
        self._low_rank: dict[str, LowRank] = {}
        self._scale = 1.0  # of what adapters add
        self._adapter: int | None = None  # whose additions are in the weights
        self._lora: MergedWeights | None = None
        self._merged: dict[str, Tensor] = {}  # by stored names: what the LoRA adapter changed
        self._reading = _Reading({}, ())
        self._tied_decoder: Tensor | None = None  # the word table, where that is another one with an adapter
        self.path = path  # the file or the index, for messages

    @classmethod
    def open(cls, model: Model) -> Checkpoint:
        """Map a model's weights and check them. Raises BrokenModel naming the file, the tensor and what is wrong."""
        tensors = stored_tensors(model.weights_folder)
        files = {path: SafetensorsFile(path) for path in dict.fromkeys(tensors.files.values())}
        path, stored = tensors.path, {name: files[file] for name, file in tensors.files.items()}
        checkpoint = cls(model.folder, path, stored)
        config, locations = model.config, dict[str, StoredName]()
        if model.lora is not None:
            checkpoint._lora = MergedWeights(model.lora, config.tensors, stored)
        for name, shape in tensor_shapes(config).items():
            if config.tensors.is_absent(name):
                checkpoint._tensors[name] = Tensor(np.zeros(shape, np.float32), "F32")
            else:
                locations[name] = checkpoint._find(name, shape, config)
        used = {stored_name.name for stored_name in locations.values()}
        used |= checkpoint._find_adapters(locations, config, model.weights_folder)
        checkpoint._check_surplus(config, used)
        sizes = {name: checkpoint._tensors[name].array.nbytes for name in locations}
        checkpoint._reading = _Reading(sizes, files.values())
        return checkpoint

    def _find(self, name: str, shape: tuple[int, ...], config: EncoderConfig) -> StoredName:
        """Keep a tensor of the encoder. Returns where it is stored. Raises BrokenModel."""
        offset = config.first_position if name == POSITION_EMBEDDINGS else 0
        stored_names = config.tensors.stored_names(name)
        stored_name = next((candidate for candidate in stored_names if candidate.name in self._files), None)
        if stored_name is None and name == WORD_EMBEDDINGS:
            stored_name = self._tied(config)
        if stored_name is None:
            raise BrokenModel(f"{self.path} has no tensor {stored_names[0].name}")
        tensor = self._read(stored_name.name)
        rows = shape[0] + offset
        tensor.check(self.path, stored_name.name, (rows * stored_name.parts, *shape[1:]))
        own = tensor.array[stored_name.part * rows : (stored_name.part + 1) * rows]
        self._tensors[name] = Tensor(own[offset:], tensor.dtype)
        if name == WORD_EMBEDDINGS and stored_name.name in self._merged:
            self._tied_decoder = self._files[stored_name.name].tensor(stored_name.name)
        if name == POSITION_EMBEDDINGS and config.padding_id is not None:
            self._tensors[PADDING_POSITION] = Tensor(own[offset - 1 : offset], tensor.dtype)
        return stored_name

    def _read(self, name: str) -> Tensor:
        """A tensor by its stored name, with the LoRA adapter's part. Raises BrokenModel."""
        if name in self._merged:
            return self._merged[name]
        tensor = self._files[name].tensor(name)
        if self._lora is not None and self._lora.changes(name):
            tensor = self._merged[name] = self._lora.merge(name, tensor)
        return tensor

    def _tied(self, config: EncoderConfig) -> StoredName | None:
        """Name of the word table if it is stored only as a masked language model's decoder, to which it is tied."""
        head = config.tensors.masked_lm
        if head is None or f"{head.decoder}.weight" not in self._files:
            return None
        tied = read_object(self.path.parent / "config.json").get("tie_word_embeddings", True)
        return StoredName(f"{head.decoder}.weight") if tied else None

    def _find_adapters(self, locations: Mapping[str, StoredName], config: EncoderConfig, folder: Path) -> set[str]:
        """Keep what adapters add to weights. Returns the names of tensors that stand next to these. Raises BrokenModel.

        `spelled` says where each tensor is stored, and `folder` has the weights.
        """
        adapters, used = config.adapters, set[str]()
        if adapters is None:
            return used
        self._scale = adapters.scale
        peft = PeftFiles(folder, config.tensors, adapters) if adapters.folders else None
        for name, stored_name in locations.items():
            shape, low_rank = self._tensors[name].shape, None
            if len(shape) != 2:
                continue
            if peft is not None:
                low_rank = peft.low_rank(name, shape)
            else:
                low_rank, names = additions_to_weight(self.path, self._files, name, shape, stored_name, adapters)
                used |= names
            if low_rank is not None:
                self._low_rank[name] = low_rank
        if peft is not None:
            peft.check_surplus()
        return used

    def _check_surplus(self, config: EncoderConfig, used: set[str]) -> None:
        """Raise BrokenModel for a layer's tensor that the architecture does not use: it would change the vectors."""
        for name in self._files:
            rest = config.tensors.layer_of(name)
            if rest is not None and name not in used and not rest.endswith(COMPUTED):
                raise BrokenModel(f"{self.path} has a tensor {name}, which config.json does not describe")

    def with_adapter(self, number: int) -> Checkpoint:
        """Returns the checkpoint with what one of the model's adapters adds to its weights; -1: none."""
        checkpoint = copy.copy(self)
        checkpoint._adapter = None if number < 0 else number
        return checkpoint

    def stored(self, name: str) -> Tensor:
        """A tensor as it is stored, with its dtype tag; with an adapter a new one in float32, where it adds to it."""
        tensor = self._tensors[name]
        self._reading.note(name)
        if self._adapter is None or name not in self._low_rank:
            return tensor
        return self._low_rank[name].add_to(tensor, self._adapter, self._scale)

    def tied_decoder(self) -> Tensor:
        """The word table as a masked language model's decoder has it: without what adapters add."""
        return self._tensors[WORD_EMBEDDINGS] if self._tied_decoder is None else self._tied_decoder

    def low_rank(self, name: str) -> LowRank | None:
        """Additions of the adapters to a weight of the encoder; None if there are none."""
        return self._low_rank.get(name)

    def layer(self, layer: Layer) -> tuple[Floats, Floats | None]:
        """The weight and the bias of a head's layer in float32. Raises BrokenModel."""
        prefix = f"{layer.name}." if layer.name else ""
        rows = [row for row in layer.difference or layer.rows if row is not None]
        if rows:
            table = self.vocabulary(layer)
            weight = Tensor(table.array[rows], table.dtype).float32()
            return weight if layer.rows else weight[:1] - weight[1:] if len(rows) > 1 else weight, None
        weight = self.of_head(f"{prefix}weight", (layer.outputs, layer.inputs), layer.file).float32()
        return weight, self.of_head(f"{prefix}bias", (layer.outputs,), layer.file).float32() if layer.bias else None

    def vocabulary(self, layer: Layer) -> Tensor:
        """A language model's matrix [vocabulary, inputs]; the word table for a layer without a name."""
        words = self._tensors[WORD_EMBEDDINGS]
        return self.of_head(f"{layer.name}.weight", (words.shape[0], layer.inputs)) if layer.name else words

    def norm(self, norm: Norm, columns: int, file: str = "") -> tuple[Floats, Floats, float]:
        """Gamma, beta and epsilon of a head's norm on rows of `columns`; `file` as in `of_head`. Raises BrokenModel."""
        gamma = self.of_head(f"{norm.name}.weight", (columns,), file).float32()
        bias = self.of_head(f"{norm.name}.bias", (columns,), file).float32() if norm.bias else None
        return gamma, np.zeros(columns, np.float32) if bias is None else bias, norm.eps

    def of_head(self, name: str, shape: tuple[int, ...], file: str = "") -> Tensor:
        """A tensor of a head, by its stored name, from a file in the model's folder or next to the encoder's own.

        Raises BrokenModel naming the file, the tensor and what is wrong.
        """
        path, files, read = self.path, self._files, self._read
        if file:
            path = self._folder / file
            one_file = SafetensorsFile(path)
            files, read = dict.fromkeys(one_file.names, one_file), one_file.tensor
        for stored_name in stored_names_of(name):
            if stored_name in files:
                tensor = read(stored_name)
                tensor.check(path, stored_name, shape)
                return tensor
        raise BrokenModel(f"{path} has no tensor {name}")

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor in float32: a view of the mapped file where it is stored so, else a converted copy."""
        return self.stored(name).float32()
