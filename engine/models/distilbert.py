"""DistilBERT: BERT without token types, under other names."""

from __future__ import annotations

from embert.engine.models.bert import DEFAULTS, qkv_parts, read_bert_like
from embert.engine.models.config_file import ConfigFile
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.models.tensor_names import (
    TOKEN_TYPE_EMBEDDINGS,
    Classification,
    MaskedLM,
    TensorNames,
    WeightMapping,
)

FIELDS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}
TENSORS = TensorNames(
    mappings=(
        WeightMapping(
            parts={
                **qkv_parts("attention.{}_lin"),
                "attention.output.dense": "attention.out_lin",
                "attention.output.LayerNorm": "sa_layer_norm",
                "intermediate.dense": "ffn.lin1",
                "output.dense": "ffn.lin2",
                "output.LayerNorm": "output_layer_norm",
            },
            prefixes=("distilbert.",),
            layers="transformer.layer.",
        ),
    ),
    absent=frozenset({TOKEN_TYPE_EMBEDDINGS}),
    masked_lm=MaskedLM(
        transform="vocab_transform",
        norm="vocab_layer_norm",
        decoder="vocab_projector",
        biases=("vocab_projector.bias",),
    ),
    classification=Classification(dense="pre_classifier", activation="relu", out="classifier"),
)


def read(config: ConfigFile) -> EncoderConfig:
    # HuggingFace's code fixes the epsilon; config.json does not state it.
    defaults = {FIELDS.get(name, name): value for name, value in {**DEFAULTS, "num_hidden_layers": 6}.items()}
    config = config.rename(FIELDS).with_missing(**defaults).with_fields(type_vocab_size=1, layer_norm_eps=1e-12)
    return read_bert_like(config, TENSORS)
