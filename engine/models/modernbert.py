"""ModernBERT: norms before attention and feed-forward, gates, rotary positions, windows in most layers.

Checkpoints have one set of tensor names, and configs two kinds of keys: transformers 5 states rotary positions and
windows by the layer's type, transformers 4 by `global_rope_theta`, `local_rope_theta` and `global_attn_every_n_layers`.
"""

from __future__ import annotations

import dataclasses

from embert.engine.models.bert import ACTIVATIONS, fused_qkv, read_bert_like
from embert.engine.models.config_file import ConfigFile
from embert.engine.models.encoder_config import Attention, EncoderConfig, Rotary
from embert.engine.models.rotary import rotary_of
from embert.engine.models.tensor_names import (
    ATTENTION,
    FINAL_NORM,
    TOKEN_TYPE_EMBEDDINGS,
    Classification,
    FusedWeight,
    MaskedLM,
    TensorNames,
    WeightMapping,
)

GLOBAL, LOCAL = "full_attention", "sliding_attention"
# A layer's type → transformers 4's field for its θ.
THETAS = {GLOBAL: "global_rope_theta", LOCAL: "local_rope_theta"}

FIELDS = {"hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps"}
# transformers' defaults for keys that config.json omits.
SHAPES = {
    "vocab_size": 50_368, "hidden_size": 768, "num_hidden_layers": 22, "num_attention_heads": 12,
    "intermediate_size": 1152, "max_position_embeddings": 8192, "norm_eps": 1e-5,
}  # fmt: skip
DEFAULTS = {
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "global_rope_theta": 160_000.0,
    "classifier_pooling": "cls",
}

SCHEME = WeightMapping(
    parts={
        "embeddings.word_embeddings": "embeddings.tok_embeddings",
        "embeddings.LayerNorm": "embeddings.norm",
        "attention.output.LayerNorm": "attn_norm",
        **fused_qkv("attn.Wqkv"),
        "attention.output.dense": "attn.Wo",
        "output.LayerNorm": "mlp_norm",
        "intermediate.gate": FusedWeight("mlp.Wi", 0, 2),
        "intermediate.dense": FusedWeight("mlp.Wi", 1, 2),
        "output.dense": "mlp.Wo",
        FINAL_NORM: "final_norm",
    },
    prefixes=("model.",),
    layers="layers.",
)

# A flag of config.json → the biases that are there if it is set, and whether it is set where the file does not say.
BIASES = {
    "norm_bias": (
        ("embeddings.LayerNorm", "attention.output.LayerNorm", "output.LayerNorm", FINAL_NORM, "head.norm"),
        False,
    ),
    "attention_bias": (ATTENTION, False),
    "mlp_bias": (("intermediate.gate", "intermediate.dense", "output.dense"), False),
    "classifier_bias": (("head.dense",), False),
    "decoder_bias": (("decoder",), True),
}


def read(config: ConfigFile) -> EncoderConfig:
    config = config.rename(FIELDS).with_missing(**SHAPES).with_defaults(**DEFAULTS).with_fields(type_vocab_size=1)
    encoder_config = dataclasses.replace(
        read_bert_like(config, _tensors(config)), position_table=False, gated=True, pre_norm=True, first_norm=False
    )
    window = config.integer("local_attention") // 2
    config.one_of("sliding_window", (window,), window)  # HuggingFace's other name for the same number
    config.one_of("rope_scaling", (None, {"rope_type": "default"}, {"type": "default"}))
    kinds = {
        GLOBAL: Attention(_rotary(config, GLOBAL, encoder_config.head_size)),
        LOCAL: Attention(_rotary(config, LOCAL, encoder_config.head_size), window),
    }
    attention = tuple(kinds[kind] for kind in _layer_types(config, encoder_config.layers))
    return dataclasses.replace(encoder_config, attention=attention)


def _tensors(config: ConfigFile) -> TensorNames:
    absent = {TOKEN_TYPE_EMBEDDINGS}
    for flag, (names, usual) in BIASES.items():
        if not config.one_of(flag, (False, True), usual):
            absent |= {f"{name}.bias" for name in names}
    activation = ACTIVATIONS[config.one_of("classifier_activation", tuple(ACTIVATIONS), "gelu")]
    head = Classification(
        "head.dense",
        "classifier",
        activation,
        norm="head.norm",
        pooling=config.one_of("classifier_pooling", ("cls", "mean")),
    )
    return TensorNames(
        (SCHEME,),
        absent=frozenset(absent),
        masked_lm=MaskedLM("head.dense", "head.norm", "decoder", ("decoder.bias",), activation),
        classification=head,
        token_classification=head,
    )


def _layer_types(config: ConfigFile, layers: int) -> list[str]:
    """Read for each layer if it sees all tokens or those in a window."""
    if config.fields.get("layer_types") is None:
        every = config.integer("global_attn_every_n_layers")
        return [LOCAL if layer % every else GLOBAL for layer in range(layers)]
    return config.list_of("layer_types", layers, tuple(THETAS))


def _rotary(config: ConfigFile, kind: str, columns: int) -> Rotary:
    """The rotary positions of a type of layers."""
    inner = config.flatten("rope_parameters", tuple(THETAS))
    inner = inner.flatten(f"rope_parameters.{kind}", ("rope_theta", "rope_type", "type", "partial_rotary_factor"))
    for name, usual in (("rope_type", "default"), ("type", "default"), ("partial_rotary_factor", 1.0)):
        inner.one_of(f"rope_parameters.{kind}.{name}", (usual,), usual)
    theta = f"rope_parameters.{kind}.rope_theta"
    if theta not in inner.fields:
        theta = THETAS[kind]
        if kind == LOCAL:  # null, in transformers 4, is the θ of the other layers
            usual = inner.number(THETAS[GLOBAL]) if theta in inner.fields else 10_000.0
            inner = inner.with_defaults(local_rope_theta=usual)
    return rotary_of(config, inner.number(theta), columns)
