"""The models of `embert serve` before any process is started: read, checked, and given their devices."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from embert.engine import Model, load_model
from embert.engine.encoders.devices import devices_of
from embert.engine.errors import ModelError
from embert.engine.files.hub import DEFAULT_MODEL_ID
from embert.server.cli.memory_plan import check_memory
from embert.server.config import ConfigError, ModelConfig
from embert.server.ipc.control import StartModel
from embert.server.supervisor.start_messages import PlannedModel

__all__ = ["name_of", "plan"]

log = logging.getLogger(__name__)


def plan(
    configs: Sequence[ModelConfig], on_download: Callable[[str, int, int], None]
) -> tuple[list[PlannedModel], dict[str, str]]:
    """The models that can be read, and the reasons why others cannot, by name. Logs both.

    Downloads missing models in parallel; `on_download` gets a model's name, its downloaded bytes and its known total.
    Raises ConfigError for options that do not fit a model.
    """
    with ThreadPoolExecutor(len(configs)) as pool:
        results = list(pool.map(lambda config: _read(config, on_download), configs))
    models: list[tuple[ModelConfig, Model]] = []
    broken: dict[str, str] = {}
    for config, model in zip(configs, results, strict=True):
        if isinstance(model, ModelError):
            name = name_of(config)
            log.error(*(("%s: %s", name, model) if len(configs) > 1 else ("%s", model)))
            broken[name] = str(model)
            continue
        _check(config, model)
        models.append((config, model))
    planned = _with_devices(models)
    _check_names(planned)
    for entry in planned:
        _log_model(entry, several=len(configs) > 1)
    if too_large := check_memory(planned):
        for reason in too_large.values():
            log.error("%s", reason)
        planned = _with_devices(
            [(entry.start.config, entry.model) for entry in planned if entry.start.name not in too_large]
        )
    return planned, broken | too_large


def _with_devices(models: Sequence[tuple[ModelConfig, Model]]) -> list[PlannedModel]:
    where = devices_of([(config.device, config.encoder, model) for config, model in models])
    return [
        PlannedModel(
            StartModel(number, config, str(model.folder), model.model_id, model.revision), model, tuple(devices)
        )
        for number, ((config, model), devices) in enumerate(zip(models, where, strict=True))
    ]


def name_of(config: ModelConfig) -> str:
    """What clients will call a model."""
    return config.served_name(config.source or DEFAULT_MODEL_ID)


def _read(config: ModelConfig, on_download: Callable[[str, int, int], None]) -> Model | ModelError:
    try:
        return load_model(
            config.source,
            revision=config.revision,
            pooling=config.pooling,
            progress=sys.stderr.isatty(),
            on_download=partial(on_download, name_of(config)),
        )
    except ModelError as error:
        return error


def _check(config: ModelConfig, model: Model) -> None:
    """Check the options that depend on the model. Raises ConfigError."""
    longest = model.max_input_length
    if config.max_batch_tokens is not None and config.max_batch_tokens < longest:
        raise ConfigError(
            f"--max-batch-tokens {config.max_batch_tokens} is below the {longest} tokens that one text may have"
        )
    name = config.default_prompt_name
    if name is not None and name not in model.prompts:
        known = ", ".join(sorted(model.prompts)) or "none"
        raise ConfigError(f"--default-prompt-name {name!r} is not one of the model's prompts ({known})")


def _check_names(planned: list[PlannedModel]) -> None:
    """Check that the names are unique. Raises ConfigError."""
    names = [entry.start.name for entry in planned]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{names.count(name)} models are named {name!r}; give each its own, as in NAME=MODEL")


def _log_model(planned: PlannedModel, *, several: bool) -> None:
    model, encoder_config, name = planned.model, planned.model.config, planned.start.name
    shown = f"{name} = {model.model_id}" if several and name != model.model_id else model.model_id
    log.info(
        "model    %s (%s, %d layers, hidden size %d, %s pooling, %d dimensions, up to %d tokens)",
        shown,
        encoder_config.model_type,
        encoder_config.layers,
        encoder_config.hidden_size,
        model.pooling,
        model.width,
        model.max_input_length,
    )
    for notice in model.notices:
        log.warning("%s", notice)
