"""A model directory in, vectors out. Knows nothing of HTTP.

    engine = Engine.load("path/or/hub-id")
    vectors = engine.embed(["a text", "another"])  # float32 [2, width]

Importing this package imports nothing else; names come from their modules when they are first asked for. Neither torch,
transformers nor huggingface_hub is imported before it is needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from embert.engine import errors

if TYPE_CHECKING:
    from embert.engine.encoders import Encoder, PackedBatch, Task, load_encoder
    from embert.engine.engine import Engine
    from embert.engine.model import Model, load_model
    from embert.engine.packing import pack
    from embert.engine.tokenizer import Encoded, Tokenizer

__all__ = [
    "Encoded",
    "Encoder",
    "Engine",
    "Model",
    "PackedBatch",
    "Task",
    "Tokenizer",
    "errors",
    "load_encoder",
    "load_model",
    "pack",
]

_MODULES = {
    "embert.engine.encoders": ("Encoder", "PackedBatch", "Task", "load_encoder"),
    "embert.engine.engine": ("Engine",),
    "embert.engine.model": ("Model", "load_model"),
    "embert.engine.packing": ("pack",),
    "embert.engine.tokenizer": ("Encoded", "Tokenizer"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
