"""jina-embeddings-v5-text: Qwen3 (small) or EuroBERT (nano), with a PEFT adapter for each of its tasks.

Its own code tells the two apart by the config class that comes with each; `is_decoder: false` states EuroBERT here.
"""

from __future__ import annotations

import dataclasses

from embert.engine.errors import BrokenModel
from embert.engine.files.json_files import inside
from embert.engine.models.config_file import ConfigFile
from embert.engine.models.decoder import read_eurobert, read_qwen3, without_heads
from embert.engine.models.encoder_config import Adapters, EncoderConfig
from embert.engine.models.jina_embeddings_v3 import peft_adapters

# The adapter of requests that name none. The model's own code requires a task; its usual use is retrieval.
DEFAULT_TASK = "retrieval"


def read(config: ConfigFile) -> EncoderConfig:
    is_decoder = config.one_of("is_decoder", (True, False), True)
    encoder_config = (read_qwen3 if is_decoder else read_eurobert)(config)
    return dataclasses.replace(without_heads(encoder_config), adapters=_adapters(config))


def _adapters(config: ConfigFile) -> Adapters | None:
    """The adapters that `task_names` lists; None where it lists none."""
    names = config.fields.get("task_names") or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise BrokenModel(f"{config.path}: task_names must list names, found {names!r}")
    if len({*names}) < len(names):
        raise BrokenModel(f"{config.path}: task_names must list each name once, found {names!r}")
    for name in names:
        inside(config.path, f"adapters/{name}")
    adapters = peft_adapters(config, {name: f"adapters/{name}" for name in names})
    if adapters is None:
        return None
    default = DEFAULT_TASK if DEFAULT_TASK in names else None
    return dataclasses.replace(adapters, default=default, names_prompts=False)
