"""The models of a server with the options of each, from the command line or from a TOML file.

[[models]]
name = "search"
model = "BAAI/bge-small-en-v1.5"

[[models]]
name = "rerank"
model = "BAAI/bge-reranker-v2-m3"
device = "cuda:1"
low_priority = true
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

# Keys of a model in the file, next to `name` and `model`: options of the command line, with underscores, and one more.
_MODEL_OPTIONS = (
    "low_priority",
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
_SINGLE_MODEL_OPTIONS = ("revision", "served_model_name")  # on the command line
_NAMED_MODEL = re.compile(r"([^/=]+)=(.+)", re.DOTALL)
_NOT_IN_NAMES = re.compile(r"[\x00-\x20\x7f?#%{}\\]|^/|/$|//")  # a name is part of paths


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ServeConfig):
    """The options of one model: its own, and the server's for those that it does not set."""

    source: str | None = None  # a folder or a hub id; None: the packaged model
    low_priority: bool = False  # of requests without X-Priority

    @property
    def name(self) -> str:
        """Name of the model for clients and metrics."""
        return self.served_name(self.source or DEFAULT_MODEL_ID)


def model_configs(config: ServeConfig) -> tuple[ModelConfig, ...]:
    """Returns the models of a server, at least one, in the order of the options. Raises ConfigError."""
    if config.config is not None:
        if config.model:
            raise ConfigError(f"--config {config.config} lists the models; MODEL {config.model[0]!r} is one too many")
        configs = tuple(_from_file(config, config.config))
    else:
        arguments: tuple[str | None, ...] = config.model or (None,)
        configs = tuple(_from_argument(config, argument) for argument in arguments)
    if len(configs) > 1 or config.config is not None:
        for option in _SINGLE_MODEL_OPTIONS:
            if getattr(config, option) is not None:
                raise ConfigError(
                    f"{option_name(option)} is for a server of one model; with several, write NAME=MODEL, or a file "
                    "for --config"
                )
    for name, count in Counter(model.name for model in configs).items():
        if count > 1:
            raise ConfigError(f"{count} models are named {name!r}; give each another name, as in NAME=MODEL")
    return configs


def _for_model(config: ServeConfig, **values: Any) -> ModelConfig:
    options = {option.name: getattr(config, option.name) for option in dataclasses.fields(ServeConfig)}
    return ModelConfig(**{**options, **values})


def _from_argument(config: ServeConfig, argument: str | None) -> ModelConfig:
    match = None if argument is None or Path(argument).exists() else _NAMED_MODEL.fullmatch(argument)
    if match is None:
        return _for_model(config, source=argument)
    name, source = match.groups()
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
    known = ("name", "model", *_MODEL_OPTIONS)
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: {key!r} is not known; known are {', '.join(known)}")
    values = {key: _convert(key, value, where) for key, value in table.items()}
    if "model" not in values:
        raise ConfigError(f"{where}: `model` is missing, a local folder or a hub id")
    name = values.pop("name", None)
    if name is not None:
        _check_name(name, f"{where}: `name`")
    # These options exclude each other, so the model's own one replaces the server's other one.
    for own, other in (("default_prompt", "default_prompt_name"), ("default_prompt_name", "default_prompt")):
        if own in values and other not in values:
            values[other] = None
    try:
        return _for_model(config, source=values.pop("model"), served_model_name=name, **values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _convert(key: str, value: Any, where: str) -> Any:
    hint = typing.get_type_hints(ModelConfig)[key] if key in _MODEL_OPTIONS else str
    expected = next((kind for kind in (bool, int, float) if hint in (kind, kind | None)), str)
    if expected is float and type(value) is int:
        return float(value)
    if type(value) is not expected:
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes"}
        raise ConfigError(f"{where}: `{key}` must be {words[expected]}; it is {value!r}")
    return value


def _check_name(name: str, what: str) -> None:
    if not name or _NOT_IN_NAMES.search(name):
        raise ConfigError(
            f"{what} must be letters, digits and marks such as - and /, because paths hold it; it is {name!r}"
        )
