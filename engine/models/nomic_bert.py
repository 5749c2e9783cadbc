"""nomic-bert: BERT with rotary positions and a gated feed-forward network, mostly without biases in its products.

Two kinds of config.json. transformers 5 has BERT's names and `rope_parameters`. The code that checkpoints name,
nomic-ai/nomic-bert-2048, has GPT-2's (`n_embd` and so on) and decides more: biases, a plain network, rotary positions
in a part of each head or a table instead. Each is read as its own code computes it, also where transformers, reading
the other's fields, would fall back on defaults. Both store tensors under the older code's names; transformers' own
names are read too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from embert.engine.errors import UnsupportedModel
from embert.engine.models.bert import DEFAULTS, GATED_PARTS, GATES, fused_qkv, read_bert_like
from embert.engine.models.config_file import MOST, ConfigFile
from embert.engine.models.encoder_config import DynamicNtk, EncoderConfig, Experts
from embert.engine.models.rotary import rotary_of, with_rope_parameters, with_rotary
from embert.engine.models.tensor_names import (
    ATTENTION,
    EXPERTS_BIAS,
    EXPERTS_INNER,
    EXPERTS_OUTER,
    ROUTER,
    TOKEN_TYPE_EMBEDDINGS,
    Classification,
    FusedWeight,
    MaskedLM,
    TensorNames,
    WeightMapping,
)

# transformers' defaults for keys that config.json omits.
THETA = 1000.0
OWN_DEFAULTS = {**DEFAULTS, "vocab_size": 30_528, "max_position_embeddings": 2048, "hidden_act": "silu"}

FIELDS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "layer_norm_eps": "layer_norm_epsilon",
}
GATED = {"swiglu": "silu", "geglu": "gelu"}
PLAIN = {"gelu": "gelu"}
GATED_STEP = 256  # a gated network's columns are rounded up to a multiple of it
VOCAB_STEP = "pad_vocab_size_multiple"  # likewise rows of the word table
# What the older code can do and no encoder here computes → the values that leave it out.
LEFT_OUT: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("prenorm", "parallel_block", "causal", "use_rms_norm", "norm_mlp"), (False, None)),
    "rotary_emb_interleaved": (False, None),
    "rotary_emb_scale_base": (None,),
}

MOST_EXPERTS = 256
# Options of experts that no encoder here computes → the values that turn them off.
EXPERTS_LEFT_OUT: dict[str, tuple[object, ...]] = {
    "hidden_act": ("gelu",),
    **dict.fromkeys(("expert_choice_router", "moe_normalize_expert_weights"), (False, None)),
    "num_shared_experts": (0, None),
    "ffn_div": (1, None),
}

PREFIXES = ("bert.", "nomic_bert.")
OLDER: Mapping[str, str | FusedWeight] = {
    "embeddings.LayerNorm": "emb_ln",
    **fused_qkv("attn.Wqkv"),
    "attention.output.dense": "attn.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.gate": "mlp.fc12",
    "intermediate.dense": "mlp.fc11",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "norm2",
    ROUTER: "mlp.router.layer.weight",
    EXPERTS_INNER: "mlp.experts.mlp.w1",
    EXPERTS_OUTER: "mlp.experts.mlp.w2",
    EXPERTS_BIAS: "mlp.experts.bias",
}
MAPPINGS = (WeightMapping(OLDER, PREFIXES, "encoder.layers."), WeightMapping(GATED_PARTS, PREFIXES, "layers."))
PLAIN_SCHEMES = (WeightMapping({**OLDER, "intermediate.dense": "mlp.fc1"}, PREFIXES, "encoder.layers."),)

INNER = ("intermediate.gate", "intermediate.dense")
# The head's activation is the layers' own.
MASKED_LM = MaskedLM(
    transform="cls.predictions.transform.dense",
    norm="cls.predictions.transform.layer_norm",
    decoder="cls.predictions.decoder",
    biases=("cls.predictions.decoder.bias", "cls.predictions.bias"),
)
CLASSIFICATION = Classification(dense="bert.pooler.dense", out="classifier")
HEAD_NAMES = {"bert.pooler": "nomic_bert.pooler"}


def read(config: ConfigFile) -> EncoderConfig:
    # The older code knows hidden_size by another name, the only one that it writes.
    return _read_older(config.rename(FIELDS)) if "hidden_size" not in config.fields else _read(config)


def _read(config: ConfigFile) -> EncoderConfig:
    """transformers' own class, which decides nothing about biases."""
    tensors = _tensors(MAPPINGS, (*ATTENTION, *INNER, "output.dense"))
    config = config.with_missing(**OWN_DEFAULTS)
    config = config.with_fields(position_embedding_type="absolute")  # it looks at rope_parameters only
    encoder_config = dataclasses.replace(read_bert_like(config, tensors, activations=GATES), gated=True)
    config.one_of("head_dim", (None, encoder_config.head_size))
    return with_rope_parameters(config, encoder_config, THETA)


def _read_older(config: ConfigFile) -> EncoderConfig:
    """The remote code: `NomicBertConfig`, `NomicBertModel` and `NomicBertBlock` of modeling_hf_nomic_bert.py."""
    for field, values in LEFT_OUT.items():
        config.one_of(field, values)
    config.one_of("num_heads_kv", (None, config.fields.get("n_head")))
    activations = {**GATED, **PLAIN}
    gated = config.one_of("hidden_act", tuple(activations)) in GATED
    without = _without_biases(config)
    types = _is_positive(config, "type_vocab_size")
    tensors = _tensors(MAPPINGS if gated else PLAIN_SCHEMES, without, types=types)
    config = config.with_fields(
        n_inner=_inner_columns(config, gated=gated),
        type_vocab_size=config.fields["type_vocab_size"] if types else 1,
        vocab_size=_round_up(config.integer("vocab_size"), config.with_defaults(**{VOCAB_STEP: 1}).integer(VOCAB_STEP)),
    )
    plain = read_bert_like(config, tensors, activations=activations)
    encoder_config = dataclasses.replace(plain, gated=gated, experts=_read_experts(config, plain))
    if not _is_positive(config, "rotary_emb_fraction"):
        return encoder_config
    fraction = config.number("rotary_emb_fraction")
    columns = encoder_config.head_size * fraction
    if fraction > 1 or columns % 2:
        raise UnsupportedModel(
            f"{config.path}: rotary_emb_fraction must give an even number of a head's {encoder_config.head_size} "
            f"columns, found {fraction:g}"
        )
    rotary = rotary_of(config, config.number("rotary_emb_base"), int(columns), _scaling(config))
    return with_rotary(encoder_config, rotary)


def _read_experts(config: ConfigFile, plain: EncoderConfig) -> Experts | None:
    """The experts of layers 1, 1 + n, 1 + 2n, … for n `moe_every_n_layers`; None where there are none.

    `described` is the same model without experts. Raises BrokenModel or UnsupportedModel.
    """
    if config.fields.get("moe_every_n_layers") in (0, None):
        config.one_of("num_experts", (0, 1, None))
        return None
    every = config.integer("moe_every_n_layers")
    if every == 1:
        raise UnsupportedModel(f"{config.path}: moe_every_n_layers must be at least 2, found 1")
    for field, values in EXPERTS_LEFT_OUT.items():
        config.one_of(field, values)
    count, inner = config.integer("num_experts", MOST_EXPERTS), plain.intermediate_size
    if count * inner > MOST:
        name = config.name("intermediate_size")
        raise UnsupportedModel(f"{config.path}: num_experts {count} times {name} {inner} must be at most {MOST}")
    return Experts(count, config.integer("moe_top_k", count), tuple(range(1, plain.layers, every)))


def _tensors(mappings: tuple[WeightMapping, ...], without: tuple[str, ...], *, types: bool = True) -> TensorNames:
    """`without` are linear layers that have no bias."""
    absent = {f"{name}.bias" for name in without}
    return TensorNames(
        mappings,
        absent=frozenset(absent if types else {*absent, TOKEN_TYPE_EMBEDDINGS}),
        masked_lm=MASKED_LM,
        classification=CLASSIFICATION,
        other_heads=HEAD_NAMES,
    )


def _without_biases(config: ConfigFile) -> tuple[str, ...]:
    """The linear layers that have none. Those of the masked language model go with the first of the network."""
    layers = {
        "qkv_proj_bias": ATTENTION,
        "mlp_fc1_bias": (*INNER, MASKED_LM.transform, MASKED_LM.decoder, "cls.predictions"),
        "mlp_fc2_bias": ("output.dense",),
    }
    return tuple(name for flag, names in layers.items() if not config.one_of(flag, (False, True)) for name in names)


def _is_positive(config: ConfigFile, field: str) -> bool:
    """True if a number is over 0. Raises BrokenModel for anything else but 0."""
    value = config.fields.get(field)
    if value == 0 and not isinstance(value, bool):
        return False
    config.number(field)
    return True


def _inner_columns(config: ConfigFile, *, gated: bool) -> int:
    """Columns of the network, as `NomciBertGatedMLP` and `NomicBertMLP` count them."""
    value = config.fields.get("n_inner")
    if not gated:
        return 4 * config.integer("hidden_size") if value is None else config.integer("intermediate_size")
    columns = 8 * config.integer("hidden_size") // 3 if value is None else config.integer("intermediate_size")
    return _round_up(columns, GATED_STEP)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _scaling(config: ConfigFile) -> DynamicNtk | None:
    """The older code's `NomicBertDynamicNTKRotaryEmbedding`: texts of over `max_trained_positions` are stretched."""
    if not config.fields.get("rotary_scaling_factor"):
        return None
    config = config.with_defaults(max_trained_positions=2048)
    return DynamicNtk(config.number("rotary_scaling_factor"), config.integer("max_trained_positions"))
