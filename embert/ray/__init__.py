"""A stage of Ray Data that embeds texts, and an application of Ray Serve. Needs the extra `ray`.

    texts.map_batches(Embedder, fn_constructor_kwargs={"model": "BAAI/bge-small-en-v1.5"}, batch_format="pyarrow", …)
    serve.run(deployment("BAAI/bge-small-en-v1.5", num_gpus=1))

docs/ray.md shows both at work.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embert.ray.embedder import Embedder
    from embert.ray.serving import application, deployment

__all__ = ["Embedder", "application", "deployment"]

_MODULES = {
    "Embedder": "embert.ray.embedder",
    "application": "embert.ray.serving",
    "deployment": "embert.ray.serving",
}
_EXTRA = ("aiohttp", "pyarrow", "ray")  # packages of the extra that we import


def __getattr__(name: str) -> Any:
    # Imported on first use: a user of Ray Data may not have Ray Serve.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        raise ModuleNotFoundError(
            f"embert.ray.{name} needs {error.name}: pip install 'embert[ray]'", name=error.name
        ) from None
    return getattr(module, name)
