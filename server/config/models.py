"""Which models a server has, and the options of each: of the command line, or of a TOML file.

[[models]]
name = "search"
model = "BAAI/bge-small-en-v1.5"

[[models]]
name = "rerank"
model = "BAAI/bge-reranker-v2-m3"
device = "cuda:1"
priority = "bulk"
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
import typing
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embert.engine.files.hub import DEFAULT_MODEL_ID
from embert.server.config.options import ConfigError, ServeConfig, option_name

__all__ = ["MODEL_OPTIONS", "PRIORITIES", "ModelConfig", "model_configs"]

PRIORITIES = ("interactive", "bulk")
# Options that a model may have for itself. In the file they have the names of the command line, with underscores.
MODEL_OPTIONS = (
    "revision",
    "device",
    "dtype",
    "min_agreement",
    "encoder",
    "pooling",
    "default_prompt_name",
    "default_prompt",
    "max_batch_tokens",
    "max_queue_tokens",
    "max_queue_seconds",
    "max_client_batch_size",
    "max_client_documents",
    "max_client_batch_tokens",
    "auto_truncate",
)
_OF_ONE_MODEL = ("revision", "served_model_name")  # on the command line
_NAMED = re.compile(r"([^/=]+)=(.+)", re.DOTALL)
_UNSUITABLE = re.compile(r"[\x00-\x20\x7f?#%{}\\]|^/|/$|//")  # in a name, which is part of paths


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ServeConfig):
    """The options as they hold for one model: the server's, and in their place the model's own."""

    source: str | None = None  # a folder or a hub id; None: the packaged model
    priority: str = "interactive"  # of requests whose header names none

    @property
    def name(self) -> str:
        """Name of the model for clients and metrics: a model's id is what `source` says."""
        return self.served_name(self.source or DEFAULT_MODEL_ID)

    @property
    def low_priority(self) -> bool:
        """True if requests give way to others unless they say otherwise."""
        return self.priority == "bulk"


def model_configs(config: ServeConfig) -> tuple[ModelConfig, ...]:
    """The models of a server, at least one, in the order in which they were given. Raises ConfigError."""
    if config.config is not None:
        if config.model:
            raise ConfigError(f"--config {config.config} lists the models; MODEL {config.model[0]!r} is one too many")
        configs = tuple(_from_file(config, config.config))
    else:
        arguments: tuple[str | None, ...] = config.model or (None,)
        configs = tuple(_from_argument(config, argument) for argument in arguments)
    if len(configs) > 1 or config.config is not None:
        for option in _OF_ONE_MODEL:
            if getattr(config, option) is not None:
                raise ConfigError(
                    f"{option_name(option)} is for a server of one model; with several, write NAME=MODEL, or a file "
                    "for --config"
                )
    named = Counter(model.name for model in configs)
    for name, times in named.items():
        if times > 1:
            raise ConfigError(f"{times} models are named {name!r}; give each another name, as in NAME=MODEL")
    return configs


def _for_model(config: ServeConfig, **values: Any) -> ModelConfig:
    options = {option.name: getattr(config, option.name) for option in dataclasses.fields(ServeConfig)}
    return ModelConfig(**{**options, **values})


def _from_argument(config: ServeConfig, argument: str | None) -> ModelConfig:
    named = None if argument is None or Path(argument).exists() else _NAMED.fullmatch(argument)
    if named is None:
        return _for_model(config, source=argument)
    name, source = named[1], named[2]
    if config.served_model_name is not None:
        raise ConfigError(f"--served-model-name and {argument!r} name the same model; give one of them")
    _check_name(name, f"the name in {argument!r}")
    return _for_model(config, source=source, served_model_name=name)


def _from_file(config: ServeConfig, path: str) -> list[ModelConfig]:
    try:
        with Path(path).open("rb") as file:
            content = tomllib.load(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path} is not TOML: {error}") from None
    tables = content.pop("models", None)
    if content:
        raise ConfigError(f"--config {path}: {min(content)!r} is not known there; it lists models, as [[models]]")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"--config {path} lists no models; write a table [[models]] for each")
    return [_from_table(config, table, f"--config {path}, model {i}") for i, table in enumerate(tables, 1)]


def _from_table(config: ServeConfig, table: dict[str, Any], where: str) -> ModelConfig:
    known = ("name", "model", "priority", *MODEL_OPTIONS)
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: {key!r} is not known; known are {', '.join(known)}")
    values = {key: _typed(key, value, where) for key, value in table.items()}
    if "model" not in values:
        raise ConfigError(f"{where}: `model` is missing, a local folder or a hub id")
    name = values.pop("name", None)
    if name is not None:
        _check_name(name, f"{where}: `name`")
    if values.get("priority", PRIORITIES[0]) not in PRIORITIES:
        raise ConfigError(f"{where}: `priority` must be one of {', '.join(PRIORITIES)}; it is {values['priority']!r}")
    # Of two options that exclude each other, the model's own replaces the server's.
    for own, other in (("default_prompt", "default_prompt_name"), ("default_prompt_name", "default_prompt")):
        if own in values and other not in values:
            values[other] = None
    try:
        return _for_model(config, source=values.pop("model"), served_model_name=name, **values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _typed(key: str, value: Any, where: str) -> Any:
    hint = typing.get_type_hints(ModelConfig)[key] if key in MODEL_OPTIONS else str
    wanted = next((kind for kind in (bool, int, float) if hint in (kind, kind | None)), str)
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes"}
        raise ConfigError(f"{where}: `{key}` must be {words[wanted]}; it is {value!r}")
    return value


def _check_name(name: str, what: str) -> None:
    if not name or _UNSUITABLE.search(name):
        raise ConfigError(
            f"{what} must be letters, digits and marks such as - and /, because paths hold it; it is {name!r}"
        )
