"""GPUs that Ray assigns to this actor. Ray also sets CUDA_VISIBLE_DEVICES, but not for an actor without a GPU."""

from __future__ import annotations

import ray


def assigned_gpus() -> int | None:
    """Returns the number of GPUs that Ray has assigned to this actor, or None outside of actors."""
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return None
    return len(ray.get_runtime_context().get_accelerator_ids()["GPU"])


def assigned_device(device: str) -> str:
    """Resolves "auto": in an actor its GPUs, or the CPU if it has none, since the node's GPUs belong to others."""
    gpus = assigned_gpus()
    return device if device != "auto" or gpus is None else "cuda" if gpus else "cpu"
