"""DeBERTa v2 and v3: BERT whose attention scores have learned parts by distance (disentangled attention).

Version 3 differs in how it was trained, not in what it computes. The convolution of the two largest checkpoints of
version 2 is refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from embert.engine.errors import BrokenModel
from embert.engine.models.bert import DEFAULTS, MASKED_LM, read_bert_like
from embert.engine.models.config_file import ConfigFile
from embert.engine.models.encoder_config import Disentangled, EncoderConfig
from embert.engine.models.tensor_names import (
    EMBEDDING_PROJECTION,
    POSITION_KEY,
    POSITION_QUERY,
    RELATIVE_NORM,
    TOKEN_TYPE_EMBEDDINGS,
    Classification,
    MaskedLM,
    TensorNames,
    WeightMapping,
)

# transformers' defaults for keys that config.json omits.
OWN_DEFAULTS: dict[str, Any] = {
    **DEFAULTS, "vocab_size": 128_100, "hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 24,
    "intermediate_size": 6144, "type_vocab_size": 0, "layer_norm_eps": 1e-7,
}  # fmt: skip
CONTENT_TO_POSITION, POSITION_TO_CONTENT = "c2p", "p2c"
FEWEST_BUCKETS = 2

# Its `pooler_hidden_act` → what the classification head computes.
POOLER_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "linear": "identity",
}
MAPPING = WeightMapping(
    parts={
        EMBEDDING_PROJECTION: "embeddings.embed_proj",
        RELATIVE_NORM: "encoder.LayerNorm",
        "attention.self.query": "attention.self.query_proj",
        "attention.self.key": "attention.self.key_proj",
        "attention.self.value": "attention.self.value_proj",
        POSITION_KEY: "attention.self.pos_key_proj",
        POSITION_QUERY: "attention.self.pos_query_proj",
    },
    prefixes=("deberta.",),
)
# Of `legacy` false: the decoder is always the word table, so no checkpoint stores one.
NEW_MASKED_LM = MaskedLM(
    transform="lm_predictions.lm_head.dense",
    norm="lm_predictions.lm_head.LayerNorm",
    decoder="lm_predictions.lm_head.decoder",
    biases=("lm_predictions.lm_head.bias",),
)


def read(config: ConfigFile) -> EncoderConfig:
    config = config.with_missing(**OWN_DEFAULTS)
    config.one_of("conv_kernel_size", (0, None), 0)
    hidden = config.integer("hidden_size")
    config.one_of("pooler_hidden_size", (hidden,), hidden)
    has_types, has_table = config.fields["type_vocab_size"] != 0, _flag(config, "position_biased_input", True)
    columns = config.integer("embedding_size") if "embedding_size" in config.fields else hidden
    encoder_config = read_bert_like(
        config if has_types else config.with_fields(type_vocab_size=1), _tensors(config, has_types=has_types)
    )
    config.one_of("attention_head_size", (encoder_config.head_size,), encoder_config.head_size)
    parts = _parts(config)
    return dataclasses.replace(
        encoder_config,
        position_table=has_table,
        embedding_size=None if columns == hidden else columns,
        projects_first=columns != hidden,
        # Every part of the score is divided by the square root of the head's columns times the number of parts, which
        # counts those of `pos_att_type` even where relative_attention is false.
        attention_scale=(encoder_config.head_size * (1 + len(parts))) ** -0.5,
        disentangled=_read_disentangled(config, parts),
    )


def _tensors(config: ConfigFile, *, has_types: bool) -> TensorNames:
    activation = POOLER_ACTIVATIONS[config.one_of("pooler_hidden_act", tuple(POOLER_ACTIVATIONS), "gelu")]
    return TensorNames(
        (MAPPING,),
        absent=frozenset({f"{EMBEDDING_PROJECTION}.bias"} | (set() if has_types else {TOKEN_TYPE_EMBEDDINGS})),
        masked_lm=MASKED_LM if _flag(config, "legacy", True) else NEW_MASKED_LM,
        classification=Classification(dense="pooler.dense", out="classifier", activation=activation),
    )


def _read_disentangled(config: ConfigFile, parts: set[str]) -> Disentangled | None:
    if not _flag(config, "relative_attention", False) or not parts:
        return None
    farthest = _integer(config, "max_relative_positions", -1)
    if farthest < 1:
        farthest = config.integer("max_position_embeddings")
    buckets = max(0, _integer(config, "position_buckets", -1))
    if buckets and not FEWEST_BUCKETS <= buckets < 2 * (farthest - 1):
        raise BrokenModel(
            f"{config.path}: position_buckets must be at least {FEWEST_BUCKETS} and below 2 · (max_relative_positions "
            f"- 1), {2 * (farthest - 1)}, or below 1 for none; found {buckets}"
        )
    return Disentangled(
        buckets=buckets,
        farthest=farthest,
        content_to_position=CONTENT_TO_POSITION in parts,
        position_to_content=POSITION_TO_CONTENT in parts,
        shared=_flag(config, "share_att_key", False),
        norm=_has_norm(config),
    )


def _parts(config: ConfigFile) -> set[str]:
    """The parts of scores by distance: a list, or a text with | between them, or null."""
    types = config.fields.get("pos_att_type")
    kinds = [name.strip() for name in types.lower().split("|")] if isinstance(types, str) else types or []
    supported = (CONTENT_TO_POSITION, POSITION_TO_CONTENT)
    if not isinstance(kinds, list) or not set(map(str, kinds)) <= {*supported, "none", ""}:
        raise config.unsupported("pos_att_type", types, supported)
    return {name for name in supported if name in kinds}


def _has_norm(config: ConfigFile) -> bool:
    """True if the table's rows have a norm: "layer_norm" or "none", or both with | between them."""
    norms = config.fields.get("norm_rel_ebd", "none")
    names = {name.strip() for name in norms.lower().split("|")} if isinstance(norms, str) else {norms}
    if not names <= {"none", "layer_norm"}:
        raise config.unsupported("norm_rel_ebd", norms, ("none", "layer_norm"))
    return "layer_norm" in names


def _flag(config: ConfigFile, field: str, usual: bool) -> bool:
    return config.one_of(field, (True, False), usual)


def _integer(config: ConfigFile, field: str, usual: int) -> int:
    value = config.fields.get(field, usual)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BrokenModel(f"{config.path}: {field} must be an int, found {value!r}")
    return value
