"""MPNet: BERT without token types; positions start after the padding's row, and distances add a bias to scores."""

from __future__ import annotations

from embert.engine.models.bert import DEFAULTS, qkv_parts, read_bert_like
from embert.engine.models.config_file import ConfigFile
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.models.roberta import CLASSIFICATION, MASKED_LM
from embert.engine.models.tensor_names import TOKEN_TYPE_EMBEDDINGS, TensorNames, WeightMapping

FIRST_POSITION = 2  # HuggingFace's code fixes the padding token's id at 1, whatever config.json says
BUCKETS = 32  # HuggingFace's code computes with this number, whatever config.json says
TENSORS = TensorNames(
    mappings=(
        WeightMapping(
            parts={
                **qkv_parts("attention.attn.{}"),
                "attention.output.dense": "attention.attn.o",
                "attention.output.LayerNorm": "attention.LayerNorm",
            },
            prefixes=("mpnet.",),
        ),
    ),
    absent=frozenset({TOKEN_TYPE_EMBEDDINGS}),
    masked_lm=MASKED_LM,
    classification=CLASSIFICATION,
)


def read(config: ConfigFile) -> EncoderConfig:
    config.one_of("relative_attention_num_buckets", (BUCKETS,), BUCKETS)
    config = config.with_missing(**{**DEFAULTS, "vocab_size": 30_527}).with_fields(type_vocab_size=1)
    return read_bert_like(config, TENSORS, first_position=FIRST_POSITION, relative_buckets=BUCKETS)
