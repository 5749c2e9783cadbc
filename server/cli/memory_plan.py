"""Estimates memory from the models' configs, and checks that they fit on their devices before loading."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from embert.engine.encoders.devices import gpu_memory
from embert.engine.host import usable_memory
from embert.engine.memory_estimate import MemoryEstimate, estimate_memory, process_bytes
from embert.server.config import ConfigError
from embert.server.supervisor.start_messages import PlannedModel

__all__ = ["check_memory"]

log = logging.getLogger(__name__)

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class _Place:
    """A memory that models share."""

    name: str
    processes: tuple[str, ...]  # the devices whose processes use it
    size: int  # bytes
    on_gpu: bool


def check_memory(planned: Sequence[PlannedModel]) -> dict[str, str]:
    """Log the plan for several models. Raises ConfigError with the sum if they do not fit together.

    Of several models, returns those that are too large for the device by themselves, as a reason by name; the others
    are planned without them. A third-party encoder is not counted, because its needs are unknown.
    """
    too_large: dict[str, str] = {}
    models = [model for model in planned if ":" not in model.start.config.encoder]
    gpus = gpu_memory() if any(device != "cpu" for model in models for device in model.devices) else []
    for place in _places(models, gpus):
        sizes = {
            model.start.name: _memory_estimate(model, on_gpu=place.on_gpu)
            for model in models
            for device in model.devices
            if device in place.processes and model.start.name not in too_large
        }
        for name, size in list(sizes.items()):
            own_size = _sum({name: size}, place)
            if len(planned) > 1 and own_size > place.size:
                too_large[name] = (
                    f"{name} needs {_gib(own_size)} GiB of {place.name}'s memory, which has {_gib(place.size)}"
                )
                del sizes[name]
        needed = _sum(sizes, place)
        parts = " + ".join(f"{name} {_gib(size.kept)}" for name, size in sizes.items())
        if needed > place.size:
            raise ConfigError(
                f"the models need {_gib(needed)} GiB of {place.name}'s memory, which has {_gib(place.size)} "
                f"({parts}, and the processes); leave models out, give them other devices, or lower --max-batch-tokens"
            )
        if len(sizes) > 1:
            log.info("memory   %s of %s GiB on %s (%s)", _gib(needed), _gib(place.size), place.name, parts)
    return too_large


def _places(models: list[PlannedModel], gpus: list[int]) -> list[_Place]:
    devices = dict.fromkeys(device for model in models for device in model.devices)
    # Of a single model, "auto" is the GPU where there is one.
    on_gpu = [device for device in devices if device.startswith("cuda") or (device == "auto" and gpus)]
    places = [
        _Place(device, (device,), gpus[_number(device)], on_gpu=True)
        for device in on_gpu
        if _number(device) < len(gpus) and gpus[_number(device)]
    ]
    on_host = tuple(device for device in devices if device not in on_gpu)
    host = usable_memory()
    return [*places, _Place("the host", on_host, host, on_gpu=False)] if on_host and host is not None else places


def _memory_estimate(planned: PlannedModel, *, on_gpu: bool) -> MemoryEstimate:
    config = planned.start.config
    device = "cuda" if on_gpu else "cpu"
    return estimate_memory(planned.model, device=device, dtype=config.dtype, max_batch_tokens=config.max_batch_tokens)


def _sum(sizes: Mapping[str, MemoryEstimate], place: _Place) -> int:
    """Models load one after the other on a GPU, so only the largest loading peak counts."""
    processes = len(place.processes) * process_bytes("cuda" if place.on_gpu else "cpu")
    loading = max((size.loading for size in sizes.values()), default=0)
    return sum(size.kept for size in sizes.values()) + loading + processes


def _number(device: str) -> int:
    _, _, number = device.partition(":")
    return int(number) if number.isdigit() else 0


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size < 10 * GIB else f"{size / GIB:.1f}"
