"""A model's weights by their names, from one safetensors file or several; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embert.engine.config import UNTYPED, EncoderConfig
from embert.engine.errors import BrokenModel
from embert.engine.json_files import read_object
from embert.engine.model import Model
from embert.engine.safetensors_file import FLOATS, SafetensorsFile, Tensor

__all__ = ["PADDING_POSITION", "Checkpoint", "encoder_tensors"]

# Checkpoints converted from TensorFlow keep its names for LayerNorm's parameters.
OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
# What a checkpoint of a whole model, its head included, puts before the encoder's names.
PREFIXES = {"bert": "bert.", "distilbert": "distilbert.", "mpnet": "mpnet."}  # the others: "roberta."
POSITIONS = "embeddings.position_embeddings.weight"
TYPES = "embeddings.token_type_embeddings.weight"
RELATIVE = "encoder.relative_attention_bias.weight"
PADDING_POSITION = "the padding token's row of " + POSITIONS  # [1, hidden]; only where config.padding_id is one
# Others' words for BERT's.
DISTILBERT = {
    "encoder.layer.": "transformer.layer.",
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
}
MPNET = {
    "attention.self.query": "attention.attn.q",
    "attention.self.key": "attention.attn.k",
    "attention.self.value": "attention.attn.v",
    "attention.output.dense": "attention.attn.o",
    "attention.output.LayerNorm": "attention.LayerNorm",
}
WORDS = {"distilbert": DISTILBERT, "mpnet": MPNET}


def encoder_tensors(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that the encoder needs, by BERT's names without a prefix, and their shapes. [out, in] for weights.

    Whatever the architecture: row i of the position table is the text's token i, and there is a table of token types.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        POSITIONS: (config.max_positions, hidden),
        TYPES: (config.type_vocab_size, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    linear = {
        "attention.self.query": (hidden, hidden),
        "attention.self.key": (hidden, hidden),
        "attention.self.value": (hidden, hidden),
        "attention.output.dense": (hidden, hidden),
        "intermediate.dense": (inner, hidden),
        "output.dense": (hidden, inner),
    }
    if config.relative_buckets:
        shapes[RELATIVE] = (config.relative_buckets, config.heads)
    for layer in range(config.layers):
        prefix = f"encoder.layer.{layer}."
        for name, shape in linear.items():
            shapes[f"{prefix}{name}.weight"] = shape
            shapes[f"{prefix}{name}.bias"] = shape[:1]
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{prefix}{name}.weight"] = shapes[f"{prefix}{name}.bias"] = (hidden,)
    return shapes


class Checkpoint:
    """The encoder's tensors, checked by name, shape and dtype, under BERT's names without a prefix."""

    def __init__(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        self._tensors = tensors
        self.path = path  # the file or the index, for messages

    @classmethod
    def open(cls, model: Model) -> Checkpoint:
        """Map a model's weights and check them. Raises BrokenModel naming the file, the tensor and what is wrong."""
        path, stored = _stored(model.transformer_folder)
        tensors: dict[str, Tensor] = {}
        config = model.config
        for name, wanted in encoder_tensors(config).items():
            if name == TYPES and config.architecture in UNTYPED:  # which is to add nothing
                tensors[name] = Tensor(np.zeros(wanted, np.float32), "F32")
                continue
            skipped = config.first_position if name == POSITIONS else 0
            expected = (wanted[0] + skipped, *wanted[1:])
            spellings = _spellings(name, config.architecture)
            tensor = next((stored[n].tensor(n) for n in spellings if n in stored), None)
            if tensor is None:
                raise BrokenModel(f"{path} has no tensor {spellings[0]}")
            if tensor.shape != expected:
                raise BrokenModel(
                    f"{path}: {spellings[0]} has shape {list(tensor.shape)}, config.json implies {list(expected)}"
                )
            if tensor.dtype not in FLOATS:
                listed = ", ".join(FLOATS)
                raise BrokenModel(f"{path}: {spellings[0]} has dtype {tensor.dtype}, expected one of {listed}")
            tensors[name] = Tensor(tensor.array[skipped:], tensor.dtype)
            if name == POSITIONS and config.padding_id is not None:
                tensors[PADDING_POSITION] = Tensor(tensor.array[skipped - 1 : skipped], tensor.dtype)
        return cls(tensors, path)

    def stored(self, name: str) -> Tensor:
        """A tensor as it is stored, and its dtype tag."""
        return self._tensors[name]

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor in float32: a view of the mapped file when it is stored so, else a converted copy."""
        return self._tensors[name].float32()


def _spellings(name: str, architecture: str) -> list[str]:
    """The names under which checkpoints store a tensor: as it is, with TensorFlow's LayerNorm, with a prefix."""
    words = WORDS.get(architecture, {})
    for ours in sorted(words, key=len, reverse=True):  # a part of another comes after it
        if ours in name:
            name = name.replace(ours, words[ours])
    names = [name, *(name.replace(new, old) for new, old in OLD_NAMES.items() if name.endswith(new))]
    prefix = PREFIXES.get(architecture, "roberta.")
    return [*names, *(prefix + n for n in names)]


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
