"""Resolves `--device` to devices."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Sequence

from embert.engine.encoders.cuda.shapes import refusal
from embert.engine.model import Model

# CUDA's devices and their memory, a line each; 0 bytes where the driver does not say.
_ASK = """
import ctypes
from embert.engine.encoders.cuda import encoder as cuda
for index in range(0 if cuda.unavailable_reason() else cuda._extension().device_count()):
    size, device = ctypes.c_size_t(), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceTotalMem_v2(
            ctypes.byref(size), device
        )
    except (OSError, AttributeError):
        pass
    print(size.value)
"""


def devices(
    device: str,
    encoder: str = "auto",
    model: Model | None = None,
    *,
    dtype: str = "auto",
    gpus: Callable[[], list[int]] | None = None,
) -> list[str]:
    """The devices to run an encoder on, each in a separate process.

    "cuda" is every visible GPU (CUDA_VISIBLE_DEVICES chooses), "cuda:0,1" is those two. "auto" is every GPU if there
    are several; with one or none it stays "auto", so that a model that the GPU cannot run goes to the CPU. So it does
    for a `model` that no GPU can run in `dtype`. `gpus` is `gpu_memory`, or what has asked it before.
    """
    kind, colon, numbers = device.partition(":")
    if colon:
        return [f"{kind}:{number}" for number in numbers.split(",")]
    if device == "cpu" or encoder in ("cpu", "torch"):
        return [device]
    if device == encoder == "auto" and model is not None and refusal(model, dtype) is not None:
        return [device]
    count = len((gpus or gpu_memory)())
    if (device == "cuda" and count) or count > 1:
        return [f"cuda:{number}" for number in range(count)]
    return [device]


def devices_of(models: Sequence[tuple[str, str, str, Model]]) -> list[list[str]]:
    """The devices of each of several models: (`device`, `encoder`, `dtype`, model). Equal devices are one process.

    Where there are several models and a GPU, none stays "auto": a model that ran on the CPU in a GPU's process would
    keep the GPU waiting.
    """
    gpus = functools.cache(gpu_memory)
    names = [devices(device, encoder, model, dtype=dtype, gpus=gpus) for device, encoder, dtype, model in models]
    if len(models) == 1 or ["auto"] not in names:
        return names
    on_cpu = "cpu" if ["cpu"] in names else "auto"  # one process for all CPU models
    for i, (_, encoder, dtype, model) in enumerate(models):
        if names[i] == ["auto"] and ":" not in encoder:
            takes_gpu = encoder != "auto" or refusal(model, dtype) is None
            names[i] = [on_cpu if not gpus() else "cuda:0" if takes_gpu else "cpu"]
    return names


def gpu_memory() -> list[int]:
    """The bytes of each visible GPU's memory, 0 where that is not known; empty where CUDA cannot be used.

    Runs in a separate process, because a loaded driver stays in a process until its end.
    """
    if importlib.util.find_spec("embert.engine._cuda") is None:
        return []
    command = [sys.executable, "-P", "-c", _ASK]  # -P: do not import from the working folder
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:  # the driver hangs; loading the encoder will report it
        return []
    return [int(line) for line in result.stdout.split()] if result.returncode == 0 else []
