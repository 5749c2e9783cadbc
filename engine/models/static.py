"""Reads models of static embeddings, whose vector of a text is the mean of one table row for each token.

The files are those of Model2Vec or of sentence-transformers' StaticEmbedding.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from embert.engine.errors import BrokenModel
from embert.engine.files.json_files import positive_int, read_object
from embert.engine.files.safetensors_header import read_header
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.models.tensor_names import TOKEN_TYPE_EMBEDDINGS, TensorNames

MODEL2VEC = "model2vec"  # model_type of its config.json
TABLES = ("embedding.weight", "embeddings")  # sentence-transformers' name, and Model2Vec's
MAPPING, WEIGHTS = "mapping", "weights"  # of each token: its row of the table, and a factor of that row
MODEL2VEC_TOKENS = 512  # its default of max_length
MOST_TOKENS = 1 << 20  # of a text, where no file limits them


def read_static(folder: Path, length: int | None) -> EncoderConfig:
    """The shape of the table next to the tokenizer.json in `folder`. A text has at most `length` tokens.

    Raises BrokenModel for a tensor that is missing or of another shape.
    """
    path = folder / "model.safetensors"
    shapes = {name: tuple(entry["shape"]) for name, entry in read_header(path).items()}
    name = table_name(path, shapes)
    if len(shapes[name]) != 2 or not all(shapes[name]):
        raise BrokenModel(f"{path}: {name} has shape {list(shapes[name])}, expected rows and columns")
    rows, columns = shapes[name]
    vocabulary = shapes.get(MAPPING, (rows,))
    for other in (MAPPING, WEIGHTS):
        if other in shapes and (len(shapes[other]) != 1 or not all(vocabulary) or shapes[other] != vocabulary):
            expected = "one number a token" if other == MAPPING else list(vocabulary)
            raise BrokenModel(f"{path}: {other} has shape {list(shapes[other])}, expected {expected}")
    return EncoderConfig(
        model_type="static",
        vocab_size=vocabulary[0],
        hidden_size=columns,
        layers=0,
        heads=1,
        intermediate_size=0,
        activation="gelu",
        max_positions=length or MOST_TOKENS,
        type_vocab_size=1,
        layer_norm_eps=0.0,
        tensors=TensorNames((), frozenset({TOKEN_TYPE_EMBEDDINGS})),
        position_table=False,
        embedding_norm=False,
    )


def table_name(path: Path, names: Container[str]) -> str:
    """The name of the table among the tensors of the file at `path`. Raises BrokenModel."""
    for name in TABLES:
        if name in names:
            return name
    raise BrokenModel(f"{path} has no tensor {' or '.join(TABLES)}")


def truncated_length(folder: Path) -> int | None:
    """The most tokens of a text as tokenizer.json states them, which sentence-transformers obeys; None: any number."""
    path = folder / "tokenizer.json"
    truncation = read_object(path).get("truncation")
    if truncation is None:
        return None
    if not isinstance(truncation, dict):
        raise BrokenModel(f"{path}: truncation must be an object, found {truncation!r}")
    return positive_int(path, truncation, "max_length")
