"""jina-embeddings-v3: XLM-RoBERTa with rotary positions, and low-rank adapters of which a request chooses one.

Two kinds of checkpoints: transformers' own, with adapters in folders as PEFT writes them, and those of the code that
jina's repository names (jinaai/xlm-roberta-flash-implementation), whose `model_type` is XLM-RoBERTa's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.files.json_files import check_keys
from embert.engine.files.key_tables import ADAPTER_CONFIG
from embert.engine.models.bert import GATED_PARTS, fused_qkv, read_bert_like
from embert.engine.models.config_file import ConfigFile
from embert.engine.models.encoder_config import Adapters, EncoderConfig
from embert.engine.models.roberta import CLASSIFICATION, MASKED_LM
from embert.engine.models.rotary import rotary_of, with_rope_parameters, with_rotary
from embert.engine.models.tensor_names import FusedWeight, TensorNames, WeightMapping

LINEAR: dict[str, str | FusedWeight] = {
    **fused_qkv("mixer.Wqkv"),
    "attention.output.dense": "mixer.out_proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}
TABLES = ("embeddings.word_embeddings", "embeddings.token_type_embeddings")
# torch's suffixes for a weight with a parametrization.
ADAPTED = ".parametrizations.weight.original"

TRANSFORMERS = WeightMapping(
    parts={**GATED_PARTS, "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2"},
    prefixes=("roberta.",),
    layers="layers.",
)
FLASH = WeightMapping(
    parts={
        **LINEAR,
        "embeddings.LayerNorm": "emb_ln",
        "attention.output.LayerNorm": "norm1",
        "output.LayerNorm": "norm2",
    },
    prefixes=("roberta.",),
    layers="encoder.layers.",
)


def _adapt(name: str | FusedWeight) -> str | FusedWeight:
    return name._replace(name=name.name + ADAPTED) if isinstance(name, FusedWeight) else name + ADAPTED


FLASH_ADAPTED = dataclasses.replace(
    FLASH,
    parts={
        **FLASH.parts,
        **{f"{ours}.weight": _adapt(stored) for ours, stored in LINEAR.items()},
        **{f"{table}.weight": table + ADAPTED for table in TABLES},
    },
)

# transformers' defaults for keys that config.json omits.
THETA = 20000.0
DEFAULTS = {
    "vocab_size": 250_002, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "max_position_embeddings": 8194, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
}  # fmt: skip

MOST_ADAPTERS = 127  # each text carries its adapter's number in 8 bits

# PEFT's adapters are named as Python names are, where jina's API has these.
TASKS = {
    "retrieval_query": "retrieval.query",
    "retrieval_passage": "retrieval.passage",
    "text_matching": "text-matching",
}
# Fields of adapter_config.json that adapters of one merged model may have → their values in those of requests.
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "use_rslora": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
}


def read_flash(config: ConfigFile) -> EncoderConfig:
    config.one_of("truncate_dim", (None,))
    config.one_of("emb_pooler", (None, "mean"))
    adapters = _flash_adapters(config)
    encoder_config = _read(config, _tensors(FLASH if adapters is None else FLASH_ADAPTED), adapters)
    theta = config.with_missing(rotary_emb_base=10000.0).number("rotary_emb_base")
    return with_rotary(encoder_config, rotary_of(config, theta, encoder_config.head_size))


def read(config: ConfigFile) -> EncoderConfig:
    config = config.with_missing(**DEFAULTS)
    paths = sorted(config.path.parent.glob("*/adapter_config.json"))
    folders = {TASKS.get(path.parent.name, path.parent.name): path.parent.name for path in paths}
    encoder_config = _read(config, _tensors(TRANSFORMERS, FLASH), peft_adapters(config, folders))
    config.one_of("head_dim", (None, encoder_config.head_size))
    return with_rope_parameters(config, encoder_config, THETA)


def _tensors(*mappings: WeightMapping) -> TensorNames:
    return TensorNames(mappings, masked_lm=MASKED_LM, classification=CLASSIFICATION)


def _read(config: ConfigFile, tensors: TensorNames, adapters: Adapters | None) -> EncoderConfig:
    encoder_config = read_bert_like(config.with_fields(position_embedding_type="absolute"), tensors)
    _check_count(config, () if adapters is None else adapters.names)
    return dataclasses.replace(encoder_config, adapters=adapters)


def _flash_adapters(config: ConfigFile) -> Adapters | None:
    """The adapters that are stored with the weights; None where there are none, or none are trained yet."""
    names, prompts = config.fields.get("lora_adaptations"), config.fields.get("task_instructions") or {}
    if not names or not config.fields.get("load_trained_adapters", False):
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise BrokenModel(f"{config.path}: lora_adaptations must list names, each once")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise BrokenModel(f"{config.path}: task_instructions must map names to texts")
    if unknown := [name for name in prompts if name not in names]:
        raise BrokenModel(
            f"{config.path}: task_instructions has {', '.join(map(repr, unknown))}, "
            "which lora_adaptations does not have"
        )
    config = config.with_fields(**{"lora_rank": 4, "lora_alpha": 1, **config.fields})
    rank = config.integer("lora_rank")
    return Adapters(tuple(names), rank, config.number("lora_alpha") / rank, tuple(prompts.items()))


def peft_adapters(config: ConfigFile, folders: Mapping[str, str]) -> Adapters | None:
    """The adapters in `folders` next to config.json, by their names; None where there are none.

    Raises BrokenModel or UnsupportedModel.
    """
    _check_count(config, folders)
    adapters: dict[str, tuple[int, float]] = {}
    for name, folder in folders.items():
        path = config.path.parent / folder / "adapter_config.json"
        adapter = ConfigFile.read(path)
        check_keys(path, {"peft_type": "LORA", **adapter.fields}, ADAPTER_CONFIG)
        for field, values in PLAIN.items():
            adapter.one_of(field, values, values[0])
        rank = adapter.integer("r")
        adapters[name] = rank, adapter.number("lora_alpha") / rank
    if not adapters:
        return None
    ranks, scales = zip(*adapters.values(), strict=True)
    if len({*ranks}) > 1 or len({*scales}) > 1:
        raise UnsupportedModel(
            f"{config.path.parent}: adapters of different r or lora_alpha are not supported; found r "
            f"{', '.join(map(str, ranks))}"
        )
    return Adapters(tuple(adapters), ranks[0], scales[0], folders=tuple(folders.values()))


def _check_count(config: ConfigFile, names: Collection[str]) -> None:
    if len(names) > MOST_ADAPTERS:
        raise UnsupportedModel(f"{config.path}: at most {MOST_ADAPTERS} adapters are supported, found {len(names)}")
