"""Embeddings and scores from BERT-like encoders: `from embert import Engine`, or `embert serve`.

`embert.engine` turns a model directory into vectors; `embert.server` serves it over HTTP. The names here are
`embert.engine`'s, and docs/python.md shows each of them at work.
"""

# A star import, so that the names stand once.
# ruff: noqa: F403, F405

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from embert import engine

if TYPE_CHECKING:
    from embert.engine import *

__all__ = [
    "Decision", "Engine", "Entity", "LabelScore", "Question", "Ranked", "SparseVector", "Task", "TokenizeOptions",
    "Tokenizer", "__version__", "errors", "load_encoder", "load_model", "pack",
]  # fmt: skip

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Imported on first use: the supervisor and the command line need neither numpy nor tokenizers.
    if name in __all__:
        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]
