"""Reads `modules.json` of sentence-transformers, and the files it names: the modules that follow the transformer.

Versions 1 to 5 and version 6 write different files; both kinds are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.files.json_files import read_json, read_object
from embert.engine.heads.dense import Dense, read_dense
from embert.engine.heads.pooling import read_pooling

__all__ = ["Modules", "read_modules"]

# A module → those that it may follow; "" is the beginning.
FOLLOWS = {
    "Transformer": ("",),
    "Pooling": ("Transformer",),
    "Dense": ("Pooling", "Dense"),
    "Normalize": ("Pooling", "Dense"),
}


@dataclass(frozen=True, slots=True)
class Modules:
    """What modules.json and the files it names say."""

    transformer: str = ""  # folder of the transformer inside the model's folder
    max_length: int | None = None  # tokens
    lowercase: bool = False
    pooling: str | None = None
    dense: tuple[Dense, ...] = ()
    normalize: bool = False


def read_modules(folder: Path, *, pooling: str | None = None) -> Modules | None:
    """Read a model's modules.json and what it names; None if there is none. `pooling` replaces the model's own.

    Raises UnsupportedModel for modules other than Transformer, Pooling, Dense …, Normalize in this order, and
    BrokenModel for files that cannot be read.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    listed = read_json(path)
    if not isinstance(listed, list) or not all(
        isinstance(module, dict) and isinstance(module.get("type"), str) and isinstance(module.get("path"), str)
        for module in listed
    ):
        raise BrokenModel(f"{path} must list objects with a type and a path")

    transformer, normalize = "", False
    dense: list[Dense] = []
    previous = ""
    for module in listed:
        # sentence_transformers.models.Pooling up to version 5, sentence_transformers.….pooling.Pooling since.
        kind = module["type"].rpartition(".")[2]
        if not module["type"].startswith("sentence_transformers.") or previous not in FOLLOWS.get(kind, ()):
            raise UnsupportedModel(
                f"{path}: module {module['type']} {f'after {previous} ' if previous else 'first '}is not supported; "
                "supported: Transformer, Pooling, then any number of Dense, then Normalize"
            )
        if kind == "Transformer":
            transformer = module["path"]
        elif kind == "Pooling":
            pooling = pooling or read_pooling(folder / module["path"] / "config.json")
        elif kind == "Dense":
            dense.append(read_dense(folder, module["path"]))
        else:
            normalize = True
        previous = kind
    max_length, lowercase = _read_transformer(folder / transformer)
    return Modules(transformer, max_length, lowercase, pooling, tuple(dense), normalize)


def _read_transformer(folder: Path) -> tuple[int | None, bool]:
    """The length limit in tokens, and whether texts are lowercased, from sentence_bert_config.json."""
    path = folder / "sentence_bert_config.json"
    if not path.is_file():
        return None, False
    fields = read_object(path)
    length = fields.get("max_seq_length")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length <= 0):
        raise BrokenModel(f"{path}: max_seq_length must be a positive int, found {length!r}")
    return length, bool(fields.get("do_lower_case", False))
