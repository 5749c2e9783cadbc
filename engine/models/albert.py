"""ALBERT: BERT with narrow embeddings, a projection after them, and few stored layers that run again and again."""

from __future__ import annotations

import dataclasses

from embert.engine.errors import BrokenModel
from embert.engine.models.bert import DEFAULTS, read_bert_like
from embert.engine.models.config_file import MOST_LAYERS, ConfigFile
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.models.tensor_names import EMBEDDING_PROJECTION, Classification, MaskedLM, TensorNames, WeightMapping

# transformers' defaults for keys that config.json omits.
OWN_DEFAULTS = {
    **DEFAULTS, "vocab_size": 30_000, "embedding_size": 128, "hidden_size": 4096, "num_attention_heads": 64,
    "intermediate_size": 16_384,
}  # fmt: skip

PARTS = {
    EMBEDDING_PROJECTION: "encoder.embedding_hidden_mapping_in",
    "attention.self.query": "attention.query",
    "attention.self.key": "attention.key",
    "attention.self.value": "attention.value",
    "attention.output.dense": "attention.dense",
    "attention.output.LayerNorm": "attention.LayerNorm",
    "intermediate.dense": "ffn",
    "output.dense": "ffn_output",
    "output.LayerNorm": "full_layer_layer_norm",
}
MASKED_LM = MaskedLM(
    transform="predictions.dense",
    norm="predictions.LayerNorm",
    decoder="predictions.decoder",
    biases=("predictions.decoder.bias", "predictions.bias"),
)
CLASSIFICATION = Classification(dense="albert.pooler", out="classifier")


def read(config: ConfigFile) -> EncoderConfig:
    """ALBERT's architecture.

    `num_hidden_layers` are spread evenly over `num_hidden_groups`, and each of them runs the `inner_group_num` layers
    of its group in order.
    """
    config = config.with_missing(**OWN_DEFAULTS)
    config = config.with_defaults(num_hidden_groups=1, inner_group_num=1, hidden_act="gelu_new")
    passes = config.layers()
    groups, inner = (config.integer(name, MOST_LAYERS) for name in ("num_hidden_groups", "inner_group_num"))
    if groups > passes:
        raise BrokenModel(
            f"{config.path}: num_hidden_groups must be at most num_hidden_layers, {passes}; found {groups}"
        )
    if passes * inner > MOST_LAYERS:
        raise BrokenModel(f"{config.path}: num_hidden_layers times inner_group_num must be at most {MOST_LAYERS}")
    tensors = TensorNames((_mapping(groups, inner),), masked_lm=MASKED_LM, classification=CLASSIFICATION)
    # HuggingFace's rounding, where the division leaves a remainder.
    group_of = [int(number / (passes / groups)) for number in range(passes)]
    return dataclasses.replace(
        read_bert_like(config, tensors),
        layers=passes * inner,
        shared_layers=tuple(group * inner + layer for group in group_of for layer in range(inner)),
        embedding_size=config.integer("embedding_size"),
    )


def _mapping(groups: int, inner: int) -> WeightMapping:
    """ALBERT counts groups, and layers in a group; here stored layers have one number."""
    numbers = {
        f"encoder.layer.{group * inner + layer}.": f"encoder.albert_layer_groups.{group}.albert_layers.{layer}."
        for group in range(groups)
        for layer in range(inner)
    }
    return WeightMapping({**PARTS, **numbers}, ("albert.",), "encoder.albert_layer_groups.")
