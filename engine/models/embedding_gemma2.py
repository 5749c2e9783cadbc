"""EmbeddingGemma 2's text part: Gemma 3's layers with attention in both directions, and one more input for each layer.

Layers without windows have heads of other shapes. Values are normalized. A projection of the embeddings gives each
layer its second input, which gates a part that the layer adds. transformers projects every row after the last layer;
here only pooled rows are projected. Vision and audio are not read.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from embert.engine.errors import BrokenModel
from embert.engine.models.config_file import ConfigFile
from embert.engine.models.decoder import FEED_FORWARD, FULL, SLIDING, decoder_config
from embert.engine.models.encoder_config import Attention, EncoderConfig
from embert.engine.models.gemma3 import MAPPING, THETAS, layer_types
from embert.engine.models.rotary import read_rotary
from embert.engine.models.tensor_names import (
    ATTENTION,
    ATTENTION_SUBLAYER_NORM,
    INPUT_DENSE,
    INPUT_GATE,
    INPUT_NORM,
    LAYER_INPUTS,
    LAYER_INPUTS_NORM,
    SUBLAYER_NORM,
    WeightMapping,
)

# transformers' defaults for keys that config.json omits.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 262_144, "rms_norm_eps": 1e-6, "sliding_window": 512, "sliding_window_pattern": 6,
    "hidden_size_per_layer_input": 512, "global_head_dim": 512, "num_global_key_value_heads": 1,
}  # fmt: skip
MOST_DIGITS = 4  # of a layer's number
HEADS = ("head_dim", "num_key_value_heads")  # fields of per_layer_config
TEXT = "language_model."
PARTS = {
    **MAPPING,
    LAYER_INPUTS: "ple.per_layer_model_projection",
    LAYER_INPUTS_NORM: "ple.per_layer_projection_norm",
    INPUT_GATE: "ple_block.per_layer_input_gate",
    INPUT_DENSE: "ple_block.per_layer_projection",
    INPUT_NORM: "ple_block.post_per_layer_input_norm",
}
WITHOUT_BIAS = (
    ATTENTION_SUBLAYER_NORM, SUBLAYER_NORM, LAYER_INPUTS, LAYER_INPUTS_NORM, INPUT_GATE, INPUT_DENSE, INPUT_NORM,
)  # fmt: skip


def read(config: ConfigFile) -> EncoderConfig:
    text_config = config.fields.get("text_config")
    if text_config is not None and not isinstance(text_config, dict):
        raise BrokenModel(f"{config.path}: text_config must be an object, found {text_config!r}")
    text = ConfigFile(Path(f"{config.path}: text_config"), text_config or {})
    text.one_of("model_type", ("embedding_gemma2_text",), "embedding_gemma2_text")
    text = text.rename({"hidden_act": "hidden_activation"}).with_missing(**DEFAULTS)
    without = FEED_FORWARD if text.one_of("attention_bias", (False, True), False) else (*ATTENTION, *FEED_FORWARD)
    plain = text.with_fields(
        **dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta", "auto_map", "architectures")),
        model_type=config.fields["model_type"],
        is_causal=False,
    )
    encoder_config = decoder_config(plain, without)
    # The last layer is FULL whatever the file says, as in transformers.
    kinds = [*layer_types(text, encoder_config.layers)[:-1], FULL]
    encoder_config = encoder_config.with_tensors(
        mappings=(WeightMapping(PARTS, prefixes=(TEXT,), layers="layers."),),
        absent=encoder_config.tensors.absent | {f"{name}.bias" for name in WITHOUT_BIAS},
        classification=None,
        token_classification=None,
        language_model=None,
        projection=f"{TEXT}embedding_projection",
    )
    return dataclasses.replace(
        encoder_config,
        attention=tuple(_attention(text, kind, heads) for kind, heads in zip(kinds, _heads(text, kinds), strict=True)),
        qk_norm=True,
        value_norm=True,
        sublayer_norms=True,
        layer_inputs=text.integer("hidden_size_per_layer_input"),
        embedding_scale=math.sqrt(encoder_config.hidden_size),
        attention_scale=1.0,
        wide_range=True,
    )


def _heads(text: ConfigFile, kinds: list[str]) -> list[ConfigFile]:
    """The file of each layer, with its own `head_dim` and `num_key_value_heads`."""
    per_layer = text.fields.get("per_layer_config")
    if per_layer is None:
        own = text.rename(dict(zip(HEADS, ("global_head_dim", "num_global_key_value_heads"), strict=True)))
        return [own if kind == FULL else text for kind in kinds]
    if not isinstance(per_layer, dict) or not all(_is_layer(key, len(kinds)) for key in per_layer):
        raise BrokenModel(
            f"{text.path}: per_layer_config must be an object of layers 0 to {len(kinds) - 1}, found {per_layer!r}"
        )
    layers = [text] * len(kinds)
    for key, own in per_layer.items():
        field = f"per_layer_config.{key}"
        found = text.with_fields(**{field: own}).flatten(field, HEADS)
        names = {name: f"{field}.{name}" for name in HEADS if f"{field}.{name}" in found.fields}
        layers[int(key)] = found.rename(names)
    return layers


def _is_layer(key: str, layers: int) -> bool:
    """True for a layer's number, which transformers writes with leading zeros."""
    return key.isdecimal() and len(key) <= MOST_DIGITS and int(key) < layers


def _attention(text: ConfigFile, kind: str, heads: ConfigFile) -> Attention:
    """Positions, window and heads of one layer."""
    columns, shared = (heads.integer(name) for name in HEADS)
    if text.integer("num_attention_heads") % shared:
        raise BrokenModel(
            f"{text.path}: num_attention_heads {text.fields['num_attention_heads']} is not a multiple of "
            f"{heads.name('num_key_value_heads')} {shared}"
        )
    rotary = read_rotary(text.flatten("rope_parameters", tuple(THETAS)), columns, THETAS[kind], kind)
    window = text.integer("sliding_window") if kind == SLIDING else None
    return Attention(rotary, window, head_columns=columns, key_value_heads=shared)
