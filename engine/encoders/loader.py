"""Chooses an encoder and loads it. An encoder's own dependencies are imported once it is chosen, not before."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, cast

from embert.engine.encoders.base import Encoder
from embert.engine.errors import UnsupportedModel
from embert.engine.model import Model

DTYPES = ("auto", "float32", "float16", "bfloat16", "int8")
ENCODERS = ("auto", "cpu", "torch", "cuda", "cuda-portable")
ON_CPU = ("cpu", "torch")


def create_encoder(
    model: Model,
    *,
    device: str = "auto",
    dtype: str = "auto",
    max_batch_tokens: int | None = None,
    encoder: str = "auto",
    prepared: bool = True,
) -> Encoder:
    """Create the encoder that `embert.engine.load_encoder` returns, which documents the arguments and errors.

    Without `prepared`, CUDA graphs are made when they are first needed: for an encoder of a few batches.
    """
    if dtype not in DTYPES:
        raise UnsupportedModel(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    if max_batch_tokens is not None and max_batch_tokens < 1:
        raise UnsupportedModel(f"max_batch_tokens must be at least 1, found {max_batch_tokens}")
    kind, choice = _choose(device, encoder)
    free = encoder == device == "auto"  # CUDA was not requested: a model that it cannot run goes to the CPU
    factory: Callable[..., Encoder]
    if kind in ON_CPU:
        factory, choice = _on_cpu(model, kind, choice, dtype, free=encoder == "auto")
        device = "cpu"
    elif kind in ("cuda", "cuda-portable"):
        factory = importlib.import_module("embert.engine.encoders.cuda.encoder").CudaEncoder
        if kind == "cuda-portable":
            factory = functools.partial(factory, gemm="cublaslt")
        device = "cuda:0" if device in ("auto", "cuda") else device
    else:
        factory = _import_encoder(kind)
    if not prepared and kind in ("cuda", "cuda-portable"):
        factory = functools.partial(factory, graphs=False)
    try:
        instance = factory(model, device=device, dtype=dtype, max_batch_tokens=max_batch_tokens)
    except UnsupportedModel as error:
        if kind != "cuda" or not free:
            raise
        factory, choice = _on_cpu(model, "cpu", f"the GPU is not used: {error}", dtype, free=True)
        instance = factory(model, device="cpu", dtype=dtype, max_batch_tokens=max_batch_tokens)
    instance.choice = "; ".join(filter(None, (choice, instance.choice)))  # the encoder's own part describes its kernels
    return instance


def _choose(device: str, encoder: str) -> tuple[str, str]:
    """The encoder to use, and the reason. Raises UnsupportedModel if the requested one is not available."""
    if ":" in encoder:
        return encoder, f"the encoder {encoder} was asked for"
    if encoder not in ENCODERS:
        raise UnsupportedModel(
            f"encoder {encoder!r} is not supported; supported: {', '.join(ENCODERS)}, or package.module:factory"
        )
    on_cuda = device.partition(":")[0] == "cuda"
    if not on_cuda and device not in ("auto", "cpu"):
        raise UnsupportedModel(f"device {device!r} is not supported; supported: auto, cpu, cuda, cuda:N")
    if encoder in ON_CPU or device == "cpu":
        if on_cuda or encoder in ("cuda", "cuda-portable"):
            raise UnsupportedModel(f"the {encoder} encoder does not run on device {device}")
        if encoder in ON_CPU:
            return encoder, f"the {encoder} encoder was asked for"
        return "cpu", "the CPU was asked for"
    reason = _cuda_unavailable()
    if reason is None and encoder == "cuda-portable":
        return encoder, "the portable CUDA kernels were asked for"
    if reason is None:
        return "cuda", "a CUDA device was found"
    if on_cuda or encoder in ("cuda", "cuda-portable"):
        raise UnsupportedModel(f"device {device if on_cuda else 'cuda'} cannot be used: {reason}")
    return "cpu", f"no CUDA device: {reason}"


def _cuda_unavailable() -> str | None:
    """Reason if the CUDA encoder cannot run here; None if it can."""
    try:
        cuda = importlib.import_module("embert.engine.encoders.cuda.encoder")
    except ModuleNotFoundError as error:
        if error.name != "embert.engine.encoders.cuda.encoder":
            raise
        return "built without CUDA"
    return cast("str | None", cuda.unavailable_reason())


def _on_cpu(model: Model, kind: str, choice: str, dtype: str, *, free: bool) -> tuple[Callable[..., Encoder], str]:
    """The encoder for a CPU, and the reason with what stands against kernels, which `free` trades for torch.

    Raises UnsupportedModel where torch, an extra, is needed and not installed.
    """
    from embert.engine.encoders.cpu.encoder import CpuEncoder
    from embert.engine.encoders.cpu.kernels import instruction_set

    if not model.config.layers:
        from embert.engine.encoders.cpu.static import StaticEncoder

        return StaticEncoder, choice
    if free and dtype == "bfloat16":
        kind, choice = "torch", f"{choice}; bfloat16 has no kernels"
    elif free and dtype in ("auto", "float32") and instruction_set() is None:
        kind, choice = "torch", f"{choice}; no kernels are installed that run on this CPU"
    if kind == "cpu":
        return CpuEncoder, choice
    try:
        from embert.engine.encoders.torch.encoder import TorchEncoder
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UnsupportedModel(f"the torch encoder needs torch ({choice}): pip install 'embert[torch]'") from None
    return TorchEncoder, choice


def _import_encoder(path: str) -> Callable[..., Encoder]:
    module, _, name = path.partition(":")
    try:
        create: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedModel(f"the encoder {path} cannot be imported: {error}") from error
    return cast("Callable[..., Encoder]", create)
