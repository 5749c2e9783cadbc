"""Gemma, and Gemma 3's text model, as EmbeddingGemma uses it: attention in both directions by config, and windows.

Gemma has LLaMA's layers, with norms that multiply by 1 + weight, and embeddings times the square root of their width.
In addition Gemma 3 has norms after attention and after the feed-forward network, norms of queries and keys, and a
different θ for the layers with windows. The weights of both were trained in bfloat16: hidden states exceed float16's
largest number.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from embert.engine.models.config_file import ConfigFile
from embert.engine.models.decoder import CLASSIFICATION, FEED_FORWARD, FULL, PARTS, SLIDING, decoder_config
from embert.engine.models.encoder_config import Attention, EncoderConfig, Rotary
from embert.engine.models.rotary import read_rotary
from embert.engine.models.tensor_names import ATTENTION, ATTENTION_SUBLAYER_NORM, SUBLAYER_NORM, WeightMapping

# transformers' defaults for keys that config.json omits.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "sliding_window_pattern": 6,
}  # fmt: skip
GEMMA = {
    "vocab_size": 256_000, "hidden_size": 3072, "intermediate_size": 24_576, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
}  # fmt: skip
PADDING_ID = 0  # where config.json does not state it; other decoders have none then
THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}

MAPPING = {
    **PARTS,
    ATTENTION_SUBLAYER_NORM: "post_attention_layernorm",
    "output.LayerNorm": "pre_feedforward_layernorm",
    SUBLAYER_NORM: "post_feedforward_layernorm",
}


def read_gemma(config: ConfigFile) -> EncoderConfig:
    config = config.with_missing(**GEMMA)
    if config.fields["hidden_act"] == "gelu":  # of the first releases, which mean the tanh form
        config = config.with_fields(hidden_act="gelu_pytorch_tanh")
    without = FEED_FORWARD if config.one_of("attention_bias", (False, True), False) else (*ATTENTION, *FEED_FORWARD)
    encoder_config = decoder_config(config, without)
    return dataclasses.replace(
        encoder_config.with_tensors(classification=CLASSIFICATION._replace(padding_id=PADDING_ID), tied=True),
        norm_offset=1.0,
        embedding_scale=math.sqrt(encoder_config.hidden_size),
        wide_range=True,
    )


def read(config: ConfigFile) -> EncoderConfig:
    config = config.rename({"hidden_act": "hidden_activation"}).with_missing(**DEFAULTS)
    config.one_of("attn_logit_softcapping", (None,))
    layers = config.layers()
    kinds = layer_types(config, layers)
    without = FEED_FORWARD if config.one_of("attention_bias", (False, True), False) else (*ATTENTION, *FEED_FORWARD)
    plain = config.with_fields(rope_parameters=None, rope_scaling=None, rope_theta=None)
    encoder_config = decoder_config(plain, without, kinds=[FULL] * layers)
    both_ways = bool(config.one_of("use_bidirectional_attention", (False, True, None), None))
    window, causal = config.integer("sliding_window"), encoder_config.causal
    if both_ways:  # half of it on each side, counted as `is_causal` has it
        window = window // 2 + (not causal)
    elif causal:  # the token itself counts
        window -= 1
    size = encoder_config.head_size
    attention = {
        FULL: Attention(_rotary(config, FULL, size)),
        SLIDING: Attention(_rotary(config, SLIDING, size), window),
    }
    absent = encoder_config.tensors.absent | {f"{name}.bias" for name in (ATTENTION_SUBLAYER_NORM, SUBLAYER_NORM)}
    encoder_config = encoder_config.with_tensors(
        mappings=(WeightMapping(MAPPING, prefixes=("model.",), layers="layers."),),
        absent=absent,
        classification=CLASSIFICATION._replace(padding_id=PADDING_ID),
        token_classification=None,
        tied=True,
    )
    return dataclasses.replace(
        encoder_config,
        attention=tuple(attention[kind] for kind in kinds),
        causal=causal and not both_ways,
        qk_norm=True,
        norm_offset=1.0,
        sublayer_norms=True,
        embedding_scale=math.sqrt(encoder_config.hidden_size),
        attention_scale=config.number("query_pre_attn_scalar") ** -0.5,
        wide_range=True,
    )


def layer_types(config: ConfigFile, layers: int) -> list[str]:
    if config.fields.get("layer_types") is not None:
        return config.list_of("layer_types", layers, tuple(THETAS))
    every = config.integer("sliding_window_pattern")
    return [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]


def _rotary(config: ConfigFile, kind: str, columns: int) -> Rotary:
    """The rotary positions of a type of layers. transformers 4 scales those of the layers without windows only."""
    if kind == SLIDING:
        config = config.with_fields(rope_scaling=None, rope_theta=config.fields.get("rope_local_base_freq"))
    return read_rotary(config.flatten("rope_parameters", tuple(THETAS)), columns, THETAS[kind], kind)
