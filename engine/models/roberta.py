"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT, but positions start after the padding token's row."""

from __future__ import annotations

from embert.engine.errors import BrokenModel
from embert.engine.models.bert import DEFAULTS, read_bert_like
from embert.engine.models.config_file import ConfigFile
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.models.tensor_names import Classification, MaskedLM, TensorNames, WeightMapping

# HuggingFace's code fixes the head's activation, whatever hidden_act says.
MASKED_LM = MaskedLM(
    transform="lm_head.dense",
    norm="lm_head.layer_norm",
    decoder="lm_head.decoder",
    biases=("lm_head.decoder.bias", "lm_head.bias"),
    activation="gelu",
)

VOCABULARY = {"roberta": 50_265}  # transformers' default, where it is not BERT's

CLASSIFICATION = Classification(dense="classifier.dense", out="classifier.out_proj")


def read(config: ConfigFile) -> EncoderConfig:
    padding = config.fields.get("pad_token_id", 1)
    if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
        raise BrokenModel(f"{config.path}: pad_token_id must be an int of at least 0, found {padding!r}")
    tensors = TensorNames((WeightMapping(prefixes=("roberta.",)),), masked_lm=MASKED_LM, classification=CLASSIFICATION)
    vocabulary = VOCABULARY.get(config.fields["model_type"], DEFAULTS["vocab_size"])
    config = config.with_missing(**{**DEFAULTS, "vocab_size": vocabulary})
    return read_bert_like(config, tensors, first_position=padding + 1)
