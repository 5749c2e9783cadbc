"""config.json → `EncoderConfig`: one file per architecture, and the table of `model_type`s.

Outside this package only the tables of tokenizer classes and of configuration keys name model types. The encoders
compute what the `EncoderConfig` describes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from embert.engine.errors import BrokenModel
from embert.engine.files.json_files import check_keys, read_object
from embert.engine.files.key_tables import BOTH_WAYS_WITH_CODE, CONFIG, CONFIG_OF_MODEL_TYPE
from embert.engine.models import (
    albert,
    bert,
    deberta,
    decoder,
    distilbert,
    electra,
    embedding_gemma2,
    gemma3,
    gte,
    jina_bert_v2,
    jina_embeddings_v3,
    jina_embeddings_v5,
    lfm2,
    modernbert,
    mpnet,
    nomic_bert,
    roberta,
    ultrabert,
)
from embert.engine.models.config_file import ConfigFile
from embert.engine.models.encoder_config import EncoderConfig

# `model_type` in config.json → what reads the rest of the file. Readers raise BrokenModel or UnsupportedModel.
MODEL_TYPES: dict[str, Callable[[ConfigFile], EncoderConfig]] = {
    "bert": bert.read,
    "roberta": roberta.read,
    "xlm-roberta": roberta.read,
    "jina_embeddings_v3": jina_embeddings_v3.read,
    "jina_embeddings_v5": jina_embeddings_v5.read,
    "camembert": roberta.read,
    "distilbert": distilbert.read,
    "mpnet": mpnet.read,
    "electra": electra.read,
    "albert": albert.read,
    "deberta-v2": deberta.read,
    "modernbert": modernbert.read,
    "nomic_bert": nomic_bert.read,
    "gte": gte.read,
    "new": gte.read,
    "eurobert": decoder.read_eurobert,
    "ultrabert": ultrabert.read,
    "llama": decoder.read_llama,
    "mistral": decoder.read_mistral,
    "ministral3": decoder.read_ministral3,
    "mistral3": decoder.read_mistral3,
    "qwen2": decoder.read_qwen2,
    "qwen3": decoder.read_qwen3,
    "bidirectional_pplx_qwen3": decoder.read_pplx,
    "gemma": gemma3.read_gemma,
    "gemma3_text": gemma3.read,
    "lfm2": lfm2.read,
    "embedding_gemma2": embedding_gemma2.read,
}

# A `model_type` and its `position_embedding_type`, which tell other models' code that states this `model_type`.
OTHER_CODE = {("bert", "alibi"): jina_bert_v2.read, ("xlm-roberta", "rotary"): jina_embeddings_v3.read_flash}

# A `model_type` → that of its text_config where the file states none; others have the same table for both.
TEXT_OF = {"mistral3": "ministral3"}

# Code that comes with a model may change their directions of attention.
DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "lfm2")


def read_config(path: Path) -> EncoderConfig:
    """Read a `config.json`.

    Raises BrokenModel if the file cannot be read or lacks a field, UnsupportedModel if it asks for what no encoder
    here computes.
    """
    config = ConfigFile.read(path)
    if config.fields.get("model_type") is None:
        raise BrokenModel(f"{path} has no model_type")
    kind = config.one_of("model_type", tuple(MODEL_TYPES))
    positions = str(config.fields.get("position_embedding_type"))
    return OTHER_CODE.get((kind, positions), MODEL_TYPES[kind])(config)


def check_config(path: Path) -> tuple[str, ...]:
    """Check a `config.json` of a model type above against the tables of keys. Returns sentences for the start-up log.

    Raises UnsupportedModel for a key whose value would change what the encoder computes.
    """
    fields = read_object(path)
    keys = {**CONFIG, **CONFIG_OF_MODEL_TYPE[fields["model_type"]]}
    notices = check_keys(path, fields, keys)
    if isinstance(inner := fields.get("text_config"), dict) and "text_config" in keys:
        kind = inner.get("model_type", TEXT_OF.get(fields["model_type"], fields["model_type"]))
        of_text = {**CONFIG, **CONFIG_OF_MODEL_TYPE[kind.removesuffix("_text")]}
        notices += check_keys(Path(f"{path}: text_config"), inner, of_text)
    is_read = keys.get("use_bidirectional_attention") is not BOTH_WAYS_WITH_CODE or fields.get("auto_map")
    if fields.get("use_bidirectional_attention") and not is_read:
        notices += (
            f"{path}: use_bidirectional_attention is not read for {fields['model_type']} without auto_map, as in "
            "transformers: is_causal decides",
        )
    code = fields.get("auto_map")
    directs = fields.get("use_bidirectional_attention") is not None or fields.get("is_causal") is not None
    classes = [str(code[name]) for name in code if name.startswith("AutoModel")] if isinstance(code, dict) else []
    directs = directs or decoder.attends_both_ways(ConfigFile(path, fields))
    if classes and not directs and fields["model_type"] in DECODERS:
        notices += (
            f"{path}: auto_map names code of the model's own ({classes[0]}), which is not run: the model is computed "
            f"as transformers' {fields['model_type']}, with causal attention; if that code attends in both directions, "
            "state is_causal false",
        )
    return notices
