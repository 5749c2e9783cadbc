"""Plans the models of `embert serve` before any process starts: reads and checks them, and assigns their devices."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from embert.engine import Model, load_model
from embert.engine.encoders.cuda.shapes import refusal
from embert.engine.encoders.devices import devices_of, gpu_memory
from embert.engine.errors import ModelError
from embert.engine.host import usable_memory
from embert.engine.memory_estimate import MemoryEstimate, estimate_memory, process_bytes
from embert.server.config import ConfigError, ModelConfig
from embert.server.ipc.control import StartModel
from embert.server.supervisor.planned_model import PlannedModel

log = logging.getLogger(__name__)

GIB = 1 << 30
SIGNAL_INTERVAL_S = 0.5


def plan(
    configs: Sequence[ModelConfig], on_download: Callable[[str, int, int], None]
) -> tuple[list[PlannedModel], dict[str, str]]:
    """Returns the models that can be served, and the reasons by name for those that cannot. Logs both.

    Downloads missing models in parallel; `on_download` gets a model's name, its downloaded bytes and its known total.
    Raises ConfigError for options that do not fit a model.
    """
    with ThreadPoolExecutor(len(configs)) as pool:
        reads = [pool.submit(_read, config, on_download) for config in configs]
        # A signal does not end a wait without a timeout if it arrives just before it, or in another thread.
        while wait(reads, SIGNAL_INTERVAL_S).not_done:
            pass
        results = [read.result() for read in reads]
    models: list[tuple[ModelConfig, Model]] = []
    broken: dict[str, str] = {}
    for config, model in zip(configs, results, strict=True):
        if isinstance(model, ModelError):
            name = config.name
            log.error(*(("%s: %s", name, model) if len(configs) > 1 else ("%s", model)))
            broken[name] = str(model)
            continue
        _check(config, model)
        models.append((config, model))
    plans = _with_devices(models)
    for each in plans:
        _log_model(each, several=len(configs) > 1)
    if too_large := _check_memory(plans):
        for reason in too_large.values():
            log.error("%s", reason)
        plans = _with_devices([(each.start.config, each.model) for each in plans if each.start.name not in too_large])
    return plans, broken | too_large


def _with_devices(models: Sequence[tuple[ModelConfig, Model]]) -> list[PlannedModel]:
    device_lists = devices_of([(config.device, config.encoder, config.dtype, model) for config, model in models])
    return [
        PlannedModel(
            StartModel(number, config, str(model.folder), model.model_id, model.revision), model, tuple(devices)
        )
        for number, ((config, model), devices) in enumerate(zip(models, device_lists, strict=True))
    ]


def _read(config: ModelConfig, on_download: Callable[[str, int, int], None]) -> Model | ModelError:
    try:
        return load_model(
            config.source,
            revision=config.revision,
            pooling=config.pooling,
            progress=sys.stderr.isatty(),
            on_download=partial(on_download, config.name),
        )
    except ModelError as error:
        return error


def _check(config: ModelConfig, model: Model) -> None:
    """Checks the options that depend on the model. Raises ConfigError."""
    longest = model.max_input_length if model.config.layers else 1  # static embeddings take any text in parts
    if config.max_batch_tokens is not None and config.max_batch_tokens < longest:
        raise ConfigError(
            f"--max-batch-tokens {config.max_batch_tokens} is below the {longest} tokens that one text may have"
        )
    name = config.default_prompt_name
    if name is not None and name not in model.prompts:
        known = ", ".join(sorted(model.prompts)) or "none"
        raise ConfigError(f"--default-prompt-name {name!r} is not one of the model's prompts ({known})")


def _log_model(plan: PlannedModel, *, several: bool) -> None:
    model, encoder_config, name = plan.model, plan.model.config, plan.start.name
    label = f"{name} = {model.model_id}" if several and name != model.model_id else model.model_id
    does = f"{model.pooling} pooling, {model.width} dimensions" if model.embeds else ", ".join(model.task_names)
    log.info(
        "model    %s (%s, %d layers, hidden size %d, %s, up to %d tokens)",
        label,
        encoder_config.model_type,
        encoder_config.layers,
        encoder_config.hidden_size,
        does,
        model.max_input_length,
    )
    for notice in model.notices:
        log.warning("%s", notice)
    config = plan.start.config
    # The process gets the device "cpu", not "auto", and cannot log this.
    if plan.devices == ("cpu",) and (reason := _gpu_refusal(config, model)):
        log.warning("%s; it runs on the CPU", reason)


def _gpu_refusal(config: ModelConfig, model: Model) -> str | None:
    """Returns the reason why "auto" does not run the model on a GPU, or None."""
    return refusal(model, config.dtype) if config.device == config.encoder == "auto" else None


@dataclass(frozen=True, slots=True)
class _Memory:
    """Memory of a GPU or of the host, which models share."""

    name: str
    processes: tuple[str, ...]  # devices whose processes use it
    size: int  # bytes
    on_gpu: bool


def _check_memory(plans: Sequence[PlannedModel]) -> dict[str, str]:
    """Logs the plan for several models. Raises ConfigError with the sum if they do not fit together.

    Returns the reason by name for each of several models that is too large by itself; the others are planned without
    them. A third-party encoder is not counted, because its needs are unknown.
    """
    too_large: dict[str, str] = {}
    models = [model for model in plans if ":" not in model.start.config.encoder]
    gpus = gpu_memory() if any(device != "cpu" for model in models for device in model.devices) else []
    for memory in _memories(models, gpus):
        sizes = {
            model.start.name: _memory_estimate(model, on_gpu=memory.on_gpu)
            for model in models
            for device in model.devices
            if device in memory.processes and model.start.name not in too_large
        }
        for name, size in list(sizes.items()):
            own_size = _sum({name: size}, memory)
            if len(plans) > 1 and own_size > memory.size:
                too_large[name] = (
                    f"{name} needs {_gib(own_size)} GiB of {memory.name}'s memory, which has {_gib(memory.size)}"
                )
                del sizes[name]
        total = _sum(sizes, memory)
        parts = " + ".join(f"{name} {_gib(size.resident)}" for name, size in sizes.items())
        if total > memory.size and len(plans) == 1:
            (size,) = sizes.values()
            items = [("weights", size.weights), ("activations", size.activations), ("loading", size.loading)]
            items.append(("the process", total - size.resident - size.loading))
            terms = " + ".join(f"{name} {_gib(part)}" for name, part in items if part)
            raise ConfigError(
                f"{plans[0].model.model_id} needs {_gib(total)} GiB of {memory.name}'s memory, which has "
                f"{_gib(memory.size)} ({terms}); choose a smaller --dtype, lower --max-batch-tokens, or another device"
            )
        if total > memory.size:
            raise ConfigError(
                f"the models need {_gib(total)} GiB of {memory.name}'s memory, which has {_gib(memory.size)} "
                f"({parts}, and the processes); leave models out, give them other devices, or lower --max-batch-tokens"
            )
        if len(sizes) > 1:
            log.info("memory   %s of %s GiB on %s (%s)", _gib(total), _gib(memory.size), memory.name, parts)
    return too_large


def _memories(models: list[PlannedModel], gpus: list[int]) -> list[_Memory]:
    devices = dict.fromkeys(device for model in models for device in model.devices)
    # With a single model, "auto" is the GPU if there is one that runs it.
    auto_is_gpu = bool(gpus) and all(_gpu_refusal(model.start.config, model.model) is None for model in models)
    on_gpu = [device for device in devices if device.startswith("cuda") or (device == "auto" and auto_is_gpu)]
    memories = [
        _Memory(device, (device,), gpus[_number(device)], on_gpu=True)
        for device in on_gpu
        if _number(device) < len(gpus) and gpus[_number(device)]
    ]
    on_host = tuple(device for device in devices if device not in on_gpu)
    host = usable_memory()
    return [*memories, _Memory("the host", on_host, host, on_gpu=False)] if on_host and host is not None else memories


def _memory_estimate(plan: PlannedModel, *, on_gpu: bool) -> MemoryEstimate:
    config = plan.start.config
    device = "cuda" if on_gpu else "cpu"
    return estimate_memory(plan.model, device=device, dtype=config.dtype, max_batch_tokens=config.max_batch_tokens)


def _sum(sizes: Mapping[str, MemoryEstimate], memory: _Memory) -> int:
    """Returns the bytes of all models. They load one after the other, so only the largest loading peak counts."""
    processes = len(memory.processes) * process_bytes("cuda" if memory.on_gpu else "cpu")
    loading = max((size.loading for size in sizes.values()), default=0)
    return sum(size.resident for size in sizes.values()) + loading + processes


def _number(device: str) -> int:
    _, _, number = device.partition(":")
    return int(number) if number.isdigit() else 0


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size < 10 * GIB else f"{size / GIB:.1f}"
