"""ELECTRA: BERT, but the embeddings may be narrower than the layers, and a projection then follows them."""

from __future__ import annotations

import dataclasses

from embert.engine.models.bert import DEFAULTS, read_bert_like
from embert.engine.models.config_file import ConfigFile
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.models.tensor_names import Classification, MaskedLM, TensorNames, WeightMapping

# transformers' defaults for keys that config.json omits.
OWN_DEFAULTS = {
    **DEFAULTS,
    "embedding_size": 128,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}

# HuggingFace's code fixes the activation of both heads, whatever hidden_act says.
TENSORS = TensorNames(
    mappings=(WeightMapping(prefixes=("electra.",)),),
    masked_lm=MaskedLM(
        transform="generator_predictions.dense",
        norm="generator_predictions.LayerNorm",
        decoder="generator_lm_head",
        biases=("generator_lm_head.bias",),
        activation="gelu",
    ),
    classification=Classification(dense="classifier.dense", out="classifier.out_proj", activation="gelu"),
)


def read(config: ConfigFile) -> EncoderConfig:
    config = config.with_missing(**OWN_DEFAULTS)
    encoder_config = read_bert_like(config, TENSORS)
    columns = config.integer("embedding_size")
    return dataclasses.replace(
        encoder_config, embedding_size=None if columns == encoder_config.hidden_size else columns
    )
