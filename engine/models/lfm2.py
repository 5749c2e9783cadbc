"""LFM2: LLaMA's layers, most of which have a gated short convolution in the place of attention.

LFM2.5's retrievers attend in both directions, and their convolutions are centered: the name of their class
states it. transformers' class does not have such a convolution: there `is_causal: false` changes attention only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from embert.engine.errors import UnsupportedModel
from embert.engine.models.bert import qkv_parts
from embert.engine.models.config_file import ConfigFile
from embert.engine.models.decoder import FEED_FORWARD, FULL, attends_both_ways, decoder_config
from embert.engine.models.encoder_config import Attention, Convolution, EncoderConfig
from embert.engine.models.tensor_names import (
    ATTENTION,
    CONVOLUTION_IN,
    CONVOLUTION_OUT,
    CONVOLUTION_TAPS,
    FINAL_NORM,
    KEY_NORM,
    QUERY_NORM,
    WeightMapping,
)

CONVOLUTION = "conv"
MOST_TAPS = 64  # a bound for what a file can ask for
LARGEST_FACTOR = 1000  # likewise

# transformers' defaults for keys that config.json omits.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 65_536, "hidden_size": 2560, "intermediate_size": 12_288, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128_000, "norm_eps": 1e-5,
    "conv_L_cache": 3, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
}  # fmt: skip
THETA = 1_000_000.0

PARTS = {
    "embeddings.word_embeddings": "embed_tokens",
    "attention.output.LayerNorm": "operator_norm",
    **qkv_parts("self_attn.{}_proj"),
    QUERY_NORM: "self_attn.q_layernorm",
    KEY_NORM: "self_attn.k_layernorm",
    "attention.output.dense": "self_attn.out_proj",
    CONVOLUTION_IN: "conv.in_proj",
    CONVOLUTION_TAPS: "conv.conv",
    CONVOLUTION_OUT: "conv.out_proj",
    "output.LayerNorm": "ffn_norm",
    "intermediate.gate": "feed_forward.w1",
    "intermediate.dense": "feed_forward.w3",
    "output.dense": "feed_forward.w2",
    FINAL_NORM: "embedding_norm",
}


def read(config: ConfigFile) -> EncoderConfig:
    names = {"rms_norm_eps": "norm_eps"}
    config = config.with_missing(**DEFAULTS)
    if "block_ff_dim" in config.fields:  # the older name, which takes precedence
        names["intermediate_size"] = "block_ff_dim"
    config = config.rename(names).with_fields(hidden_act="silu")
    encoder_config = decoder_config(config, (*ATTENTION, *FEED_FORWARD), theta=THETA)
    biases = config.one_of("conv_bias", (False, True), False)
    taps = config.integer("conv_L_cache", MOST_TAPS)
    centered = attends_both_ways(config.with_fields(is_causal=True))
    if centered and taps % 2 == 0:
        raise UnsupportedModel(f"{config.path}: conv_L_cache must be odd for a centered convolution, found {taps}")
    mixers = {
        FULL: encoder_config.attention[0],
        CONVOLUTION: Attention(convolution=Convolution(taps, taps // 2 if centered else 0)),
    }
    absent = {f"{name}.bias" for name in (CONVOLUTION_IN, CONVOLUTION_TAPS, CONVOLUTION_OUT) if not biases}
    encoder_config = encoder_config.with_tensors(
        mappings=(WeightMapping(PARTS, prefixes=("model.",), layers="layers."),),
        absent=encoder_config.tensors.absent | absent,
        classification=None,
        token_classification=None,
        tied=True,
    )
    return dataclasses.replace(
        encoder_config,
        attention=tuple(mixers[kind] for kind in _layer_types(config, encoder_config.layers)),
        intermediate_size=_inner_columns(config),
        qk_norm=True,
    )


def _layer_types(config: ConfigFile, layers: int) -> list[str]:
    if config.fields.get("layer_types") is not None:
        return config.list_of("layer_types", layers, (FULL, CONVOLUTION))
    indices = config.fields.get("full_attn_idxs")
    if indices is None:
        return [FULL] * layers
    if not isinstance(indices, list) or not all(type(each) is int and 0 <= each < layers for each in indices):
        raise config.unsupported("full_attn_idxs", indices, (f"a list of layers, 0 to {layers - 1}",))
    return [FULL if layer in indices else CONVOLUTION for layer in range(layers)]


def _inner_columns(config: ConfigFile) -> int:
    """Columns of the feed-forward network: two thirds of the stated ones, rounded up; or as stated."""
    columns = config.integer("intermediate_size")
    if not config.one_of("block_auto_adjust_ff_dim", (True, False), True):
        return columns
    columns = int(2 * columns / 3)
    if config.fields["block_ffn_dim_multiplier"] is None:
        return columns
    factor = config.number("block_ffn_dim_multiplier")
    if factor > LARGEST_FACTOR:
        raise config.unsupported("block_ffn_dim_multiplier", factor, (f"up to {LARGEST_FACTOR}",))
    multiple = config.integer("block_multiple_of")
    return -(-int(factor * columns) // multiple) * multiple
