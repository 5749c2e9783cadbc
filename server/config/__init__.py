"""Every option of `embert serve`, and what of them holds for each of its models."""

from embert.server.config.models import ModelConfig, model_configs
from embert.server.config.options import (
    ConfigError,
    ServeConfig,
    check_environment,
    environment_name,
    environment_names,
    option_name,
    read_api_keys,
)

__all__ = [
    "ConfigError",
    "ModelConfig",
    "ServeConfig",
    "check_environment",
    "environment_name",
    "environment_names",
    "model_configs",
    "option_name",
    "read_api_keys",
]
