"""UltraBERT: EuroBERT's layers, of which two in three have a window, and a θ for each type of layers.

Two spellings: transformers 5 states `layer_types`, `sliding_window` and `rope_parameters`; published checkpoints state
a window (0: none) and a θ for each layer, in `attention_windows` and `rope_theta`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.models.config_file import ConfigFile
from embert.engine.models.decoder import DEFAULTS, FULL, PARTS, SLIDING, llama_config
from embert.engine.models.encoder_config import Attention, EncoderConfig
from embert.engine.models.rotary import ROPE, read_rotary
from embert.engine.models.tensor_names import TOKEN_CLASSIFICATION, Classification, WeightMapping

# transformers' defaults for keys that config.json omits.
OWN_DEFAULTS = {**DEFAULTS, "max_position_embeddings": 32_768, "sliding_window": 128}
THETAS = {FULL: 2_560_000.0, SLIDING: 10_000.0}
FULL_EVERY = 3


def read(config: ConfigFile) -> EncoderConfig:
    config = _with_types(config.with_missing(**OWN_DEFAULTS))
    kinds = config.list_of("layer_types", config.layers(), tuple(THETAS))
    plain = config.with_fields(rope_parameters=None, rope_scaling=None, is_causal=False)
    encoder_config = llama_config(plain, kinds=kinds)
    rope = config.flatten(ROPE, tuple(THETAS))
    rotary = {kind: read_rotary(rope, encoder_config.head_size, THETAS[kind], kind) for kind in THETAS}
    pooling = config.one_of("classifier_pooling", ("cls", "mean"), "cls")
    encoder_config = encoder_config.with_tensors(
        mappings=(WeightMapping(PARTS, prefixes=("model.", "ultrabert."), layers="layers."),),
        classification=Classification(dense="", out="classifier", pooling=pooling),
        token_classification=TOKEN_CLASSIFICATION,
        language_model=None,
    )
    windows = [each.window for each in encoder_config.attention]
    attention = tuple(Attention(rotary[kind], window) for kind, window in zip(kinds, windows, strict=True))
    return dataclasses.replace(encoder_config, attention=attention)


def _with_types(config: ConfigFile) -> ConfigFile:
    """Returns the file in transformers 5's spelling."""
    windows, layers = config.fields.get("attention_windows"), config.layers()
    kinds = [FULL if (layer + 1) % FULL_EVERY == 0 else SLIDING for layer in range(layers)]
    if windows is not None:
        widths_of_layers = [window or 0 for window in _each(config, "attention_windows")]
        kinds = [SLIDING if window else FULL for window in widths_of_layers]
        widths = _by_type(config, "attention_windows", widths_of_layers, kinds)
        config = config.with_fields(sliding_window=widths.get(SLIDING, config.fields["sliding_window"]))
    config = config.with_defaults(layer_types=kinds)
    if config.fields.get("rope_theta") is None or config.fields.get(ROPE) is not None:
        return config
    kinds = config.list_of("layer_types", layers, tuple(THETAS))
    thetas = _by_type(config, "rope_theta", _each(config, "rope_theta"), kinds)
    return config.with_fields(rope_theta=None, **{ROPE: {kind: {"rope_theta": thetas[kind]} for kind in thetas}})


def _each(config: ConfigFile, field: str) -> list[Any]:
    """A list with a value for each layer."""
    values, layers = config.fields[field], config.layers()
    if not isinstance(values, list) or len(values) != layers:
        raise BrokenModel(f"{config.path}: {field} must be a list of {layers} values, one a layer; found {values!r}")
    return values


def _by_type(config: ConfigFile, field: str, values: list[Any], kinds: list[str]) -> dict[str, Any]:
    """The value of each type of layers, which has to be the same in all of them."""
    by_type = dict(zip(kinds, values, strict=True))
    for kind, value in zip(kinds, values, strict=True):
        if value != by_type[kind]:
            raise UnsupportedModel(
                f"{config.path}: {field} must have one value for all layers of {kind}, found {value!r} and "
                f"{by_type[kind]!r}"
            )
    return by_type
