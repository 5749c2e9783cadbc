"""The GPUs of this actor. Ray also sets CUDA_VISIBLE_DEVICES, but not for an actor without a GPU."""

from __future__ import annotations

import ray


def assigned_gpus() -> int | None:
    """How many GPUs Ray has given this actor; None where this is no actor."""
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return None
    return len(ray.get_runtime_context().get_accelerator_ids()["GPU"])


def assigned_device(asked: str) -> str:
    """The device that "auto" means: in an actor its GPUs, or the CPU. One that has none must not take another's."""
    gpus = assigned_gpus()
    return asked if asked != "auto" or gpus is None else "cuda" if gpus else "cpu"
