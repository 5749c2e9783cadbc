"""A model directory in, vectors or scores out. Knows nothing of HTTP.

    engine = Engine.load("path/or/hub-id")
    vectors = engine.embed(["a text", "another"])  # float32 [2, width]

Importing this package imports nothing else: each name is imported from its module on first use. torch, transformers and
huggingface_hub are imported only where they are needed.

Packages and modules, each of which imports only from those before it: `files` (hub, JSON, safetensors), `models`
(config.json → EncoderConfig), `heads` (what follows the last layer), `model` (a model directory, described), `weights`
(tensors and adapters), `quantization` (int8, defined in numpy), `tokenization` (texts → ids), `encoders` (ids → rows),
`entities` (rows of tokens → entities), `decisions` (questions → pairs, logits → decisions), `int8_accuracy` (what int8
costs), `loader`, `engine`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from embert.engine import errors

if TYPE_CHECKING:
    from embert.engine.batch import PackedBatch, SparseVector, TaskOutput, pack
    from embert.engine.decisions import Decision, Option, Question
    from embert.engine.encoders.base import Encoder
    from embert.engine.engine import Engine
    from embert.engine.entities import Entity
    from embert.engine.heads.scores import LabelScore, Ranked
    from embert.engine.loader import load_encoder
    from embert.engine.model import Model, load_model
    from embert.engine.tasks import Task
    from embert.engine.tokenization.encoded import Encoded, TokenizeOptions
    from embert.engine.tokenization.tokenizer import Tokenizer

__all__ = [
    "Decision", "Encoded", "Encoder", "Engine", "Entity", "LabelScore", "Model", "Option", "PackedBatch",
    "Question", "Ranked", "SparseVector", "Task", "TaskOutput", "TokenizeOptions", "Tokenizer", "errors",
    "load_encoder", "load_model", "pack",
]  # fmt: skip

# A module → the names that are imported from it.
_NAMES = {
    "batch": ("PackedBatch", "SparseVector", "TaskOutput", "pack"),
    "decisions": ("Decision", "Option", "Question"),
    "encoders.base": ("Encoder",),
    "engine": ("Engine",),
    "entities": ("Entity",),
    "heads.scores": ("LabelScore", "Ranked"),
    "loader": ("load_encoder",),
    "model": ("Model", "load_model"),
    "tasks": ("Task",),
    "tokenization.encoded": ("Encoded", "TokenizeOptions"),
    "tokenization.tokenizer": ("Tokenizer",),
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]
