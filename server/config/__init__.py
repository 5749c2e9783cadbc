"""Every option of `embert serve`, and the options of each model."""

from embert.server.config.models import ModelConfig, model_configs
from embert.server.config.options import (
    ConfigError,
    ServeConfig,
    check_environment,
    environment_name,
    environment_names,
    option_name,
    read_api_keys,
    tls_context,
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
    "tls_context",
]
