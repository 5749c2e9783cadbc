"""Which devices `--device` means."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

__all__ = ["devices"]

_ASK = """
from embert.engine.encoders import cuda
print(0 if cuda.unavailable_reason() else cuda._extension().device_count())
"""


def devices(device: str, encoder: str = "auto") -> list[str]:
    """The devices to run an encoder on, each in a process of its own.

    "cuda" is every GPU that can be seen (CUDA_VISIBLE_DEVICES chooses), "cuda:0,1" those two. "auto" is every GPU where
    there are several; with one or none it stays "auto", so that a model which the GPU cannot run may go to the CPU.
    """
    kind, colon, numbers = device.partition(":")
    if colon:
        return [f"{kind}:{number}" for number in numbers.split(",")]
    if device == "cpu" or encoder == "torch":
        return [device]
    gpus = _visible_gpus()
    if (device == "cuda" and gpus) or gpus > 1:
        return [f"cuda:{number}" for number in range(gpus)]
    return [device]


def _visible_gpus() -> int:
    """Asked in a process of its own: a driver, once loaded, stays in a process until its end."""
    if importlib.util.find_spec("embert.engine._cuda") is None:
        return 0
    command = [sys.executable, "-P", "-c", _ASK]  # -P: the working folder is not for code
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:  # a driver that hangs; the encoder that is asked for will say what it can
        return 0
    return int(asked.stdout) if asked.returncode == 0 else 0
