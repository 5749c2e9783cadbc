"""Every option of `embert serve`, and the options of each model."""

from embert.server.config.models import ModelConfig as ModelConfig
from embert.server.config.models import model_configs as model_configs
from embert.server.config.options import ConfigError as ConfigError
from embert.server.config.options import ServeConfig as ServeConfig
from embert.server.config.options import check_environment as check_environment
from embert.server.config.options import environment_name as environment_name
from embert.server.config.options import environment_names as environment_names
from embert.server.config.options import option_name as option_name
from embert.server.config.options import read_api_keys as read_api_keys
from embert.server.config.options import tls_context as tls_context
