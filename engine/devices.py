"""Which devices a `--device` option means, and for which models a GPU is not chosen unasked."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from embert.engine.architecture.architecture import Architecture

__all__ = ["devices", "untried_parts"]

_ASK = """
from embert.engine.encoders import cuda
print(0 if cuda.unavailable_reason() else cuda._extension().device_count())
"""


def devices(device: str, encoder: str = "auto", architecture: Architecture | None = None) -> list[str]:
    """The devices to run an encoder on, each in a process of its own.

    "cuda" is every visible GPU (CUDA_VISIBLE_DEVICES chooses), "cuda:0,1" is those two. "auto" is every GPU if there
    are several; with one or none it stays "auto", so that a model that the GPU cannot run goes to the CPU. So it does
    for an `architecture` with parts that nothing but the encoder "cuda" takes to a GPU.
    """
    kind, colon, numbers = device.partition(":")
    if colon:
        return [f"{kind}:{number}" for number in numbers.split(",")]
    if device == "cpu" or encoder == "torch":
        return [device]
    if device == encoder == "auto" and architecture is not None and untried_parts(architecture):
        return [device]
    gpus = _visible_gpus()
    if (device == "cuda" and gpus) or gpus > 1:
        return [f"cuda:{number}" for number in range(gpus)]
    return [device]


def untried_parts(architecture: Architecture) -> str:
    """What of a model's architecture the CUDA encoder computes, but has never computed on a GPU; empty: nothing."""
    kinds = [architecture.attention_of(layer) for layer in range(architecture.layers)]
    parts = {
        "rotary positions": any(each.rotary for each in kinds),
        "windows": any(each.window for each in kinds),
        "ALiBi": architecture.alibi,
        "gates": architecture.gated,
        "norms before attention": architecture.pre_norm,
        "embeddings that are projected": architecture.embedding_size is not None,
        "shared layers": bool(architecture.shared_layers),
    }
    return ", ".join(name for name, has in parts.items() if has)


def _visible_gpus() -> int:
    """Count in a process of its own, because a loaded driver stays in a process until its end."""
    if importlib.util.find_spec("embert.engine._cuda") is None:
        return 0
    command = [sys.executable, "-P", "-c", _ASK]  # -P: do not import from the working folder
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:  # the driver hangs; loading the encoder will report it
        return 0
    return int(asked.stdout) if asked.returncode == 0 else 0
