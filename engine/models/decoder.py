"""Decoders as encoders: LLaMA, Mistral, Qwen2 and Qwen3, and EuroBERT, which has their layers.

One forward pass a text, without generation or a KV cache.

Pre-norm layers with RMSNorm, rotary positions, grouped-query attention and a gated feed-forward network. Attention is
causal unless `attends_both_ways`; EuroBERT's and pplx-embed's never is.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.files.json_files import architectures_of
from embert.engine.models.bert import GATES, qkv_parts
from embert.engine.models.config_file import ConfigFile
from embert.engine.models.encoder_config import Attention, EncoderConfig, LongQueries
from embert.engine.models.rotary import read_rotary
from embert.engine.models.tensor_names import (
    ATTENTION,
    FINAL_NORM,
    KEY_NORM,
    QUERY_NORM,
    TOKEN_CLASSIFICATION,
    TOKEN_TYPE_EMBEDDINGS,
    Classification,
    TensorNames,
    WeightMapping,
)

FULL, SLIDING = "full_attention", "sliding_attention"

FEED_FORWARD = ("intermediate.gate", "intermediate.dense", "output.dense")
PARTS = {
    "embeddings.word_embeddings": "embed_tokens",
    "attention.output.LayerNorm": "input_layernorm",
    **qkv_parts("self_attn.{}_proj"),
    QUERY_NORM: "self_attn.q_norm",
    KEY_NORM: "self_attn.k_norm",
    "attention.output.dense": "self_attn.o_proj",
    "output.LayerNorm": "post_attention_layernorm",
    "intermediate.gate": "mlp.gate_proj",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
    FINAL_NORM: "norm",
}
NORMS = ("attention.output.LayerNorm", "output.LayerNorm", FINAL_NORM)
# In the names of classes that attend in both directions: Qwen3BidirectionalModel of voyage-4-nano, for one.
BOTH_WAYS = "Bidirectional"
# voyage-4-nano's own linear layer, without a bias, which its code applies to every hidden state.
PROJECTION = "linear"
# …ForSequenceClassification: one linear layer without a bias.
CLASSIFICATION = Classification(dense="", out="score", pooling="last-token", out_bias=False)

# transformers' defaults for keys that config.json omits.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "intermediate_size": 11_008, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
EUROBERT = {
    **DEFAULTS, "vocab_size": 128_256, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
}  # fmt: skip
# Its `classifier_pooling` → the rows that the classification head takes.
EUROBERT_POOLINGS = {"bos": "cls", "mean": "mean", "late": "late"}
MISTRAL = {**DEFAULTS, "num_key_value_heads": 8, "intermediate_size": 14_336, "max_position_embeddings": 131_072}
MINISTRAL3 = {
    **DEFAULTS, "vocab_size": 131_072, "hidden_size": 4096, "num_hidden_layers": 34, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 14_336, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5,
    "sliding_window": None,
}  # fmt: skip
MINISTRAL3_ROPE = {
    "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
MINISTRAL3_PADDING = 11  # where config.json states none
QWEN = {
    **DEFAULTS, "vocab_size": 151_936, "num_key_value_heads": 32, "intermediate_size": 22_016,
    "max_position_embeddings": 32_768, "sliding_window": 4096,
}  # fmt: skip


def read_llama(config: ConfigFile) -> EncoderConfig:
    return llama_config(config.with_missing(**DEFAULTS))


def read_eurobert(config: ConfigFile) -> EncoderConfig:
    """EuroBERT: LLaMA's layers with attention in both directions."""
    config = config.with_missing(**EUROBERT)
    encoder_config = llama_config(config.with_fields(is_causal=False))
    pooling = config.one_of("classifier_pooling", tuple(EUROBERT_POOLINGS), "late")
    config.one_of("clf_pooling", (pooling,), pooling)  # the name in the authors' own code, which transformers ignores
    classification = Classification("dense", "classifier", "gelu", pooling=EUROBERT_POOLINGS[pooling])
    return encoder_config.with_tensors(
        classification=classification, token_classification=TOKEN_CLASSIFICATION, language_model=None
    )


def llama_config(config: ConfigFile, *, kinds: list[str] | None = None) -> EncoderConfig:
    """The description of layers with LLaMA's options of biases. `kinds` are those of `decoder_config`."""
    biases = {flag: config.one_of(flag, (False, True), False) for flag in ("attention_bias", "mlp_bias")}
    without = (() if biases["attention_bias"] else ATTENTION) + (() if biases["mlp_bias"] else FEED_FORWARD)
    return decoder_config(config, without, kinds=kinds)


def read_mistral(config: ConfigFile) -> EncoderConfig:
    """Mistral: a window in every layer unless `sliding_window` is null.

    With `layer_types` transformers reads the file as Ministral's, whose layers they describe.
    """
    config = config.with_missing(**MISTRAL, sliding_window=4096)
    kinds = [FULL if config.fields["sliding_window"] is None else SLIDING] * config.layers()
    if config.fields.get("layer_types") is not None:
        kinds = config.list_of("layer_types", len(kinds), (FULL, SLIDING))
    return decoder_config(config, (*ATTENTION, *FEED_FORWARD), kinds=kinds)


def read_ministral3(config: ConfigFile) -> EncoderConfig:
    """Ministral 3: YaRN, and queries multiplied by their position."""
    config = config.with_missing(**MINISTRAL3)
    config = config.with_defaults(rope_parameters=MINISTRAL3_ROPE) if not config.fields.get("rope_scaling") else config
    field = "rope_scaling" if config.fields.get("rope_scaling") else "rope_parameters"
    parameters = config.fields[field]
    rope = dict(parameters) if isinstance(parameters, dict) else parameters
    beta = rope.pop("llama_4_scaling_beta", None) if isinstance(rope, dict) else None
    if isinstance(rope, dict):
        rope.pop("max_position_embeddings", None)  # as config.json states it next to rope_parameters
    kinds = [FULL if config.fields["sliding_window"] is None else SLIDING] * config.layers()
    encoder_config = decoder_config(config.with_fields(**{field: rope}), (*ATTENTION, *FEED_FORWARD), kinds=kinds)
    encoder_config = encoder_config.with_tensors(classification=CLASSIFICATION._replace(padding_id=MINISTRAL3_PADDING))
    if beta is None:
        return encoder_config
    read = config.flatten(field, tuple(parameters))
    scaling = LongQueries(
        read.number(f"{field}.llama_4_scaling_beta"), read.integer(f"{field}.original_max_position_embeddings")
    )
    return dataclasses.replace(encoder_config, long_queries=scaling)


def read_mistral3(config: ConfigFile) -> EncoderConfig:
    """The text part of Mistral 3, whose other part reads images.

    Rerankers of NVIDIA's code take the mean of the rows.
    """
    text = config.fields.get("text_config")
    if not isinstance(text, dict):
        raise BrokenModel(f"{config.path}: text_config must be an object, found {text!r}")
    inner = ConfigFile(Path(f"{config.path}: text_config"), text)
    readers = {"ministral3": read_ministral3, "mistral": read_mistral}
    encoder_config = readers[inner.one_of("model_type", tuple(readers), "ministral3")](inner)
    config.one_of("pooling", ("avg",), "avg")
    mapping = WeightMapping(PARTS, prefixes=("model.language_model.", "language_model.model.", "language_model."),
                            layers="layers.")  # fmt: skip
    encoder_config = dataclasses.replace(encoder_config, model_type=config.fields["model_type"])
    return encoder_config.with_tensors(
        mappings=(mapping,),
        classification=CLASSIFICATION._replace(pooling="mean"),
        token_classification=None,
        other_heads={"score": "language_model.score"},
    )


def read_qwen2(config: ConfigFile) -> EncoderConfig:
    """Qwen2: queries, keys and values have biases."""
    config = config.with_missing(**QWEN)
    return decoder_config(config, ("attention.output.dense", *FEED_FORWARD), kinds=_layer_types(config))


def read_qwen3(config: ConfigFile) -> EncoderConfig:
    """Qwen3: heads of any size, whose queries and keys have norms."""
    config = config.with_missing(**QWEN, head_dim=128)
    without = FEED_FORWARD if config.one_of("attention_bias", (False, True), False) else (*ATTENTION, *FEED_FORWARD)
    encoder_config = dataclasses.replace(decoder_config(config, without, kinds=_layer_types(config)), qk_norm=True)
    projects = any(BOTH_WAYS in name for name in class_names(config))
    return encoder_config.with_tensors(projection=PROJECTION if projects else "")


def read_pplx(config: ConfigFile) -> EncoderConfig:
    """pplx-embed: Qwen3 with attention in both directions."""
    return without_heads(read_qwen3(config.with_fields(is_causal=False)))


def without_heads(encoder_config: EncoderConfig) -> EncoderConfig:
    """The description of a model type that only embeds."""
    return encoder_config.with_tensors(classification=None, token_classification=None)


def class_names(config: ConfigFile) -> tuple[str, ...]:
    """Names of the classes that config.json states for its weights: in `architectures`, and in `auto_map`."""
    code = config.fields.get("auto_map")
    mapped = [value for name, value in code.items() if name.startswith("AutoModel")] if isinstance(code, dict) else []
    return tuple(str(name).rpartition(".")[2] for name in (*architectures_of(config.fields), *mapped))


def attends_both_ways(config: ConfigFile) -> bool:
    """True if a decoder's config.json, or the name of its class, states attention in both directions.

    Such code reads `use_bidirectional_attention`, which transformers' own classes of these types do not.
    """
    both_ways = not config.one_of("is_causal", (True, False), True)
    if config.fields.get("auto_map"):
        both_ways = bool(config.one_of("use_bidirectional_attention", (False, True, None), None)) or both_ways
    return both_ways or any(BOTH_WAYS in name for name in class_names(config))


def decoder_config(
    config: ConfigFile, without_bias: tuple[str, ...], *, kinds: list[str] | None = None, theta: float = 10_000.0
) -> EncoderConfig:
    """The description of LLaMA-like layers; `without_bias` are their linear layers that have none.

    `kinds` are the layers' types, FULL where None. `theta` is the model type's default. Raises BrokenModel or
    UnsupportedModel.
    """
    layers, heads, hidden = config.layers(), config.integer("num_attention_heads"), config.integer("hidden_size")
    shared = heads if config.fields.get("num_key_value_heads") is None else config.integer("num_key_value_heads")
    if heads % shared:
        raise BrokenModel(
            f"{config.path}: num_attention_heads {heads} is not a multiple of num_key_value_heads {shared}"
        )
    stated_size = config.fields.get("head_dim") is not None
    if not stated_size and hidden % heads:
        raise UnsupportedModel(
            f"{config.path}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and "
            "head_dim is missing"
        )
    size = config.integer("head_dim") if stated_size else hidden // heads
    causal = not attends_both_ways(config)
    kinds = kinds or [FULL] * layers
    window: int | None = None
    if SLIDING in kinds:
        # transformers counts the token itself in a causal window, not in that of `is_causal: false`.
        window = config.integer("sliding_window") - causal
    rotary = read_rotary(config, size, theta)
    attention = {FULL: Attention(rotary), SLIDING: Attention(rotary, window)}
    absent = {TOKEN_TYPE_EMBEDDINGS, *(f"{name}.bias" for name in (*NORMS, *without_bias))}
    return EncoderConfig(
        model_type=config.fields["model_type"],
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        intermediate_size=config.integer("intermediate_size"),
        activation=GATES[config.one_of("hidden_act", tuple(GATES))],
        max_positions=config.integer("max_position_embeddings"),
        type_vocab_size=1,
        layer_norm_eps=config.number("rms_norm_eps"),
        tensors=TensorNames(
            (WeightMapping(PARTS, prefixes=("model.",), layers="layers."),),
            absent=frozenset(absent),
            classification=CLASSIFICATION,
            token_classification=Classification(
                dense="", out="score", out_bias=config.one_of("token_classification_bias", (True, False), True)
            ),
            language_model="lm_head",
            tied=False,
        ),
        position_table=False,
        attention=tuple(attention[kind] for kind in kinds),
        gated=True,
        rms_norm=True,
        pre_norm=True,
        embedding_norm=False,
        causal=causal,
        key_value_heads=shared,
        head_columns=size,
    )


def _layer_types(config: ConfigFile) -> list[str]:
    """FULL or SLIDING for each layer, as Qwen's configs say. Raises BrokenModel or UnsupportedModel."""
    layers = config.layers()
    windows = config.one_of("use_sliding_window", (False, True), False)
    if windows and config.fields["sliding_window"] is None:
        windows = False
    if config.fields.get("layer_types") is not None:
        kinds = config.list_of("layer_types", layers, (FULL, SLIDING))
        if SLIDING in kinds and not windows:
            raise UnsupportedModel(
                f"{config.path}: layer_types has {SLIDING}, and use_sliding_window is false: transformers refuses it"
            )
        return kinds
    first = config.with_missing(max_window_layers=28).fields["max_window_layers"]
    if isinstance(first, bool) or not isinstance(first, int):
        raise BrokenModel(f"{config.path}: max_window_layers must be an int, found {first!r}")
    return [SLIDING if windows and layer >= first else FULL for layer in range(layers)]
