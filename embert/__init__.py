"""Embeddings from encoders of the BERT family: `from embert import Engine`, or `embert serve`.

`embert.engine` turns a model directory into vectors; `embert.server` serves it over HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embert.engine import Engine

__all__ = ["Engine", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the supervisor and the command line need neither numpy nor tokenizers.
    if name == "Engine":
        from embert.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
