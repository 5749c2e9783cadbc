"""GTE: BERT with rotary positions and a gated feed-forward network.

`model_type` is gte or new, and there are two kinds of config.json. transformers 5 states `rope_parameters`. The code
that most checkpoints name, Alibaba-NLP/new-impl, states `rope_theta` and `rope_scaling`, and can have a table of
positions instead. Its scaling "ntk" is fixed: it changes every text's angles, where transformers' "dynamic" changes
those of long texts; transformers has no "ntk". Each file is read as its own code computes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from embert.engine.errors import BrokenModel
from embert.engine.models.bert import DEFAULTS, GATED_PARTS, GATES, fused_qkv, qkv_parts, read_bert_like
from embert.engine.models.config_file import ConfigFile
from embert.engine.models.encoder_config import EncoderConfig, Ntk
from embert.engine.models.rotary import rotary_of, with_rope_parameters, with_rotary
from embert.engine.models.tensor_names import (
    TOKEN_TYPE_EMBEDDINGS,
    Classification,
    FusedWeight,
    MaskedLM,
    TensorNames,
    WeightMapping,
)

# transformers' defaults for keys that config.json omits.
THETA = 160_000.0
OWN_DEFAULTS = {**DEFAULTS, "vocab_size": 250_048, "max_position_embeddings": 8192, "type_vocab_size": 1}
# Fields of the older code's files, in addition to `rope_theta`.
OLDER_FIELDS = {"rope_scaling", "layer_norm_type", "logn_attention_scale", "pack_qkv"}
PREFIXES = ("new.", "gte.")

# The older code's `pack_qkv` decides between the first two; which tensors there are says the same.
UNPACKED: Mapping[str, str | FusedWeight] = {
    **qkv_parts("attention.{}_proj"),
    "attention.output.dense": "attention.o_proj",
    "attention.output.LayerNorm": "attn_ln",
    "intermediate.gate": FusedWeight("mlp.up_gate_proj", 1, 2),
    "intermediate.dense": FusedWeight("mlp.up_gate_proj", 0, 2),
    "output.dense": "mlp.down_proj",
    "output.LayerNorm": "mlp_ln",
}
PACKED: Mapping[str, str | FusedWeight] = {**UNPACKED, **fused_qkv("attention.qkv_proj")}
MAPPINGS = (
    WeightMapping(PACKED, PREFIXES),
    WeightMapping(UNPACKED, PREFIXES),
    WeightMapping(GATED_PARTS, PREFIXES, "layers."),
)
ABSENT = frozenset({"intermediate.gate.bias", "intermediate.dense.bias"})
MASKED_LM = MaskedLM(
    transform="lm_head.dense", norm="lm_head.norm", decoder="lm_head.decoder", biases=("lm_head.decoder.bias",)
)
CLASSIFICATION = Classification(dense="new.pooler.dense", out="classifier")
HEAD_NAMES = {"new.pooler": "gte.pooler", "lm_head.norm": "lm_head.layer_norm"}


def read(config: ConfigFile) -> EncoderConfig:
    own = config.fields.get("rope_parameters") is not None or (
        config.fields["model_type"] == "gte" and not OLDER_FIELDS & config.fields.keys()
    )
    types = config.fields.get("type_vocab_size") != 0
    tensors = TensorNames(
        MAPPINGS,
        absent=ABSENT if types else ABSENT | {TOKEN_TYPE_EMBEDDINGS},
        # transformers fixes the head's activation; the older code takes the layers' own.
        masked_lm=dataclasses.replace(MASKED_LM, activation="gelu" if own else ""),
        classification=CLASSIFICATION,
        other_heads=HEAD_NAMES,
    )
    if own:
        config = config.with_missing(**OWN_DEFAULTS)
    known = config.with_fields(position_embedding_type="absolute")
    if not types:
        known = known.with_fields(type_vocab_size=1)
    encoder_config = dataclasses.replace(read_bert_like(known, tensors, activations=GATES), gated=True)
    if not own:
        return _older(config, encoder_config)
    config.one_of("head_dim", (None, encoder_config.head_size))
    return with_rope_parameters(config, encoder_config, THETA)


def _older(config: ConfigFile, encoder_config: EncoderConfig) -> EncoderConfig:
    """The remote code: `NewConfig` and `NewEmbeddings` of new-impl.

    With `rms_norm` the layers have RMS norms and the embeddings LayerNorm, which no architecture here says.
    """
    config.one_of("layer_norm_type", ("layer_norm",), "layer_norm")
    config.one_of("logn_attention_scale", (False, None))
    if config.one_of("position_embedding_type", ("rope", "absolute"), "rope") == "absolute":
        return encoder_config
    rotary = rotary_of(config, config.number("rope_theta"), encoder_config.head_size, _scaling(config))
    return with_rotary(encoder_config, rotary)


def _scaling(config: ConfigFile) -> Ntk | None:
    """`NTKScalingRotaryEmbedding` without `mixed_b`, which would stretch each frequency by a different factor."""
    if config.fields.get("rope_scaling") is None:
        return None
    scaling = config.flatten("rope_scaling", ("type", "rope_type", "factor", "mixed_b"))
    for name in ("type", "rope_type"):
        scaling.one_of(f"rope_scaling.{name}", ("ntk",), "ntk")
    scaling.one_of("rope_scaling.mixed_b", (None,))
    factor = scaling.number("rope_scaling.factor")
    if factor < 1:
        raise BrokenModel(f"{config.path}: rope_scaling.factor must be at least 1, found {factor}")
    return Ntk(factor)
