"""Fields of config.json that cannot be served: the error names the field and its value."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from embert.engine.errors import ModelError
from embert.engine.models import read_config
from tests.engine.models.test_gte import CONFIG as GTE
from tests.oracles.jina_bert_v2 import CONFIG as JINA_BERT
from tests.oracles.model_cases import MODEL_CASES, hugging_face
from tests.oracles.nomic_bert import CONFIG as NOMIC
from tests.oracles.nomic_bert import EXPERTS

# Configs in the spelling of the models' own code, which transformers does not write.
OWN = {"new": GTE, "nomic_bert, own": NOMIC, "nomic_bert, experts": {**NOMIC, **EXPERTS}, "jina_bert_v2": JINA_BERT}
ROPE = "rope_parameters"

# A model → the fields that are changed, the last of which the error names; or, where it names more, with what.
REFUSED: dict[str, list[dict[str, Any] | tuple[dict[str, Any], str]]] = {
    "bert": [
        {"model_type": "t5"}, ({"model_type": None}, "has no model_type"),
        {"position_embedding_type": "relative_key"}, {"is_decoder": True}, {"hidden_act": "swish"},
        ({"num_attention_heads": 5}, "hidden_size 64 is not a multiple of num_attention_heads 5"),
        {"hidden_size": "64"}, {"hidden_size": None}, {"num_hidden_layers": 0}, {"vocab_size": True},
        {"layer_norm_eps": "x"},
    ],
    "roberta": [
        {"pad_token_id": -1}, {"pad_token_id": True},
        ({"max_position_embeddings": 2}, "max_position_embeddings must be above 2"),
    ],
    "mpnet": [{"relative_attention_num_buckets": 0}, {"relative_attention_num_buckets": 64}],
    "distilbert": [{"n_layers": 0}, ({"n_heads": 5}, "dim 64 is not a multiple of n_heads 5"), {"activation": "silu"}],
    "electra": [
        {"embedding_size": 0}, {"embedding_size": None}, {"hidden_act": "swish"},
        {"position_embedding_type": "relative_key"},
    ],
    "albert": [
        {"embedding_size": None},
        ({"num_hidden_groups": 3}, "num_hidden_groups must be at most num_hidden_layers, 2; found 3"),
        {"num_hidden_groups": 0}, {"inner_group_num": True},
    ],
    "eurobert": [{"classifier_pooling": "max"}, {"clf_pooling": "mean"}, {"hidden_act": "mish"}],
    "ultrabert": [
        {"classifier_pooling": "late"}, {"sliding_window": 0}, {"layer_types": 3}, {"attention_windows": 5},
        ({"attention_windows": [4, 5]}, "attention_windows must have one value for all layers of sliding_attention"),
        ({"attention_windows": ["4", "4"]}, "sliding_window must be a positive int, found '4'"),
        {ROPE: None, "rope_theta": 5.0},
        ({ROPE: None, "rope_theta": [5.0]}, "rope_theta must be a list of 2 values, one a layer; found [5.0]"),
        ({ROPE: None, "rope_theta": [5.0, 7.0]}, "layers of sliding_attention, found 5.0 and 7.0"),
        ({ROPE: {"rope_theta": 5}}, f"{ROPE}.rope_theta is not supported"),
    ],
    "qwen3": [
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({ROPE: {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"), {"model_type": "qwen3_moe"},
    ],
    "bidirectional_pplx_qwen3": [{"use_sliding_window": 2}, {"head_dim": 0}],
    "jina_embeddings_v5": [{"is_decoder": 3}, {"task_names": "retrieval"}],
    "ministral3": [
        ({"rope_parameters": {"rope_theta": 1.0, "llama_4_scaling_beta": 0.1}}, "no rope_parameters.original_max_pos"),
        {"sliding_window": 0},
    ],
    "qwen2": [({"layer_types": ["sliding_attention"] * 2}, "layer_types")],
    "gemma": [{"attention_bias": 2}, {"hidden_act": "mish"}],
    "embedding_gemma2": [
        {"text_config": 3}, ({"text_config": {"model_type": "gemma3_text"}}, "text_config: model_type 'gemma3_text'"),
        ({"text_config": {"hidden_size_per_layer_input": 0}}, "hidden_size_per_layer_input must be a positive int"),
        ({"text_config": {"sliding_window": 0}}, "sliding_window must be a positive int, found 0"),
        ({"text_config": {"sliding_window_pattern": -1}}, "sliding_window_pattern must be a positive int, found -1"),
        ({"text_config": {"attention_bias": 2}}, "attention_bias 2 is not supported"),
        ({"text_config": {"global_head_dim": 0}}, "global_head_dim must be a positive int, found 0"),
        ({"text_config": {"num_global_key_value_heads": 3}}, "a multiple of num_global_key_value_heads 3"),
        ({"text_config": {"per_layer_config": {"24": {}}}}, "per_layer_config must be an object of layers 0 to 23"),
        ({"text_config": {"per_layer_config": {"5": 3}}}, "per_layer_config.5 must be an object, found 3"),
        ({"text_config": {"per_layer_config": {"5": {"head_dim": True}}}}, "per_layer_config.5.head_dim must be"),
        ({"text_config": {"per_layer_config": {"5": {"hidden_size": 3}}}}, "per_layer_config.5.hidden_size"),
        ({"text_config": {ROPE: {"full_attention": {"rope_type": "proportional"}}}}, "rope_type 'proportional'"),
    ],
    "lfm2": [
        {"conv_L_cache": 0}, ({"conv_L_cache": 65}, "conv_L_cache must be at most 64, found 65"),
        ({"conv_L_cache": 4, "architectures": ["Lfm2BidirectionalModel"]}, "conv_L_cache must be odd"),
        {"conv_bias": 2}, {"norm_eps": 0},
        ({"layer_types": ["conv", "linear_attention"]}, "layer_types 'linear_attention' is not supported"),
        ({"layer_types": ["conv"]}, "layer_types must be a list of 2 types, found 1"),
        {"layer_types": None, "full_attn_idxs": [2]}, {"block_auto_adjust_ff_dim": 1.5}, {"block_ff_dim": 0},
        {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1e9},
        {"block_auto_adjust_ff_dim": True, "block_multiple_of": 0},
    ],
    "gemma3_text": [{"attn_logit_softcapping": 50.0}, {"model_type": "gemma3"}],
    "llama": [
        ({"head_dim": 15}, "rotate pairs of a head's columns, found 15"),
        ({"rope_scaling": {"type": "linear"}}, "has no rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 3}}, "rope_scaling.beta_fast"),
    ],
    "deberta-v2": [
        {"conv_kernel_size": 3}, {"pooler_hidden_size": 32}, {"pooler_hidden_act": "mish"},
        {"attention_head_size": 32}, {"pos_att_type": ["p2c", "p2p"]}, {"norm_rel_ebd": "batch_norm"},
        {"max_relative_positions": "128"}, {"position_buckets": True},
        ({"position_buckets": 1}, "position_buckets must be at least 2 and below 2 · (max_relative_positions - 1)"),
        ({"position_buckets": 254}, "found 254"), {"embedding_size": 0}, {"share_att_key": None},
        {"type_vocab_size": -1}, {"hidden_act": "swish"}, {"model_type": "deberta"},
    ],
    "modernbert": [
        {"hidden_activation": "silu2"}, {"classifier_activation": "mish"}, {"classifier_pooling": "max"},
        {"norm_bias": "yes"}, {"norm_eps": 0}, {"local_attention": 0}, {"sliding_window": 9},
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 2 types, found 1"), {"layer_types": 3},
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types 'chunked_attention'"),
        {"layer_types": None, "global_attn_every_n_layers": 0},
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling {'type': 'linear', 'factor': 2}"),
        {ROPE: 5}, ({ROPE: {"rope_theta": 5}}, f"{ROPE}.rope_theta is not supported"),
        {ROPE: {"full_attention": {"rope_theta": 5, "rope_type": "yarn"}}},
        ({ROPE: {"sliding_attention": {"factor": 5}}}, f"{ROPE}.sliding_attention.factor is not supported"),
        {ROPE: {"sliding_attention": {"partial_rotary_factor": 0.5}}},
        {ROPE: {"full_attention": {"rope_theta": "x"}}}, {ROPE: None, "global_rope_theta": -1},
        ({"num_attention_heads": 64}, "rotate pairs of a head's columns"),
    ],
    "nomic_bert": [
        {"hidden_act": "mish"}, {"head_dim": 32},
        ({"num_attention_heads": 64, "head_dim": None}, "rotate pairs of a head's columns"),
        {"rope_scaling": {"type": "ntk"}}, {ROPE: 5}, {ROPE: {"rope_type": "longrope"}},
        ({ROPE: {"type": "linear"}}, f"has no {ROPE}.factor"),
        ({ROPE: {"beta_fast": 5}}, f"{ROPE}.beta_fast is not supported"), {ROPE: {"rope_theta": 0}},
        {ROPE: {"rope_theta": math.inf}}, {ROPE: {"rope_theta": math.nan}},
        ({ROPE: {"rope_type": "dynamic"}}, f"has no {ROPE}.factor"), {ROPE: {"rope_type": "dynamic", "factor": 0.5}},
        ({ROPE: {"rope_type": "dynamic", "factor": 1e9}}, f"{ROPE}.factor must be 1 to 1000, found 1e+09"),
        ({ROPE: {"rope_type": "dynamic", "factor": 2}, "num_attention_heads": 32, "head_dim": None}, "columns rotate"),
        {ROPE: {"partial_rotary_factor": 0.5}},
    ],
    "nomic_bert, own": [
        {"prenorm": True}, {"parallel_block": True}, {"causal": True}, {"use_rms_norm": True}, {"norm_mlp": True},
        {"rotary_emb_interleaved": True}, {"rotary_emb_scale_base": 512}, {"num_experts": 8},
        ({"moe_every_n_layers": 2}, "activation_function 'swiglu' is not supported"), {"num_heads_kv": 1},
        {"activation_function": "glu"}, {"qkv_proj_bias": None}, {"mlp_fc1_bias": 2},
        ({"n_head": 5}, "n_embd 48 is not a multiple of n_head 5"), ({"n_head": 16}, "a head's 3 columns"),
        {"n_inner": 0}, {"n_positions": -1}, {"type_vocab_size": -1}, {"type_vocab_size": False},
        {"layer_norm_epsilon": "x"}, {"pad_vocab_size_multiple": 0}, {"rotary_emb_base": 0},
        {"rotary_emb_fraction": 1.5}, {"rotary_emb_fraction": 0.3}, {"rotary_emb_fraction": None},
        ({"rotary_emb_fraction": 0.125, "rotary_scaling_factor": 2}, "more than 2 columns rotate, found 2"),
        {"rotary_scaling_factor": "2"}, {"rotary_scaling_factor": 2, "max_trained_positions": 0},
    ],
    "nomic_bert, experts": [
        {"moe_every_n_layers": 1}, {"moe_every_n_layers": "2"},
        ({"num_experts": 257}, "num_experts must be at most 256, found 257"),
        ({"num_experts": 256, "n_inner": 2**23}, "num_experts 256 times n_inner 8388608 must be at most 2147483647"),
        ({"moe_top_k": 6}, "moe_top_k must be at most 5, found 6"), {"moe_top_k": 0}, {"num_experts": None},
        {"num_shared_experts": 1}, {"expert_choice_router": True}, {"moe_normalize_expert_weights": True},
    ],
    "new": [
        {"layer_norm_type": "rms_norm"}, {"logn_attention_scale": True}, {"position_embedding_type": "alibi"},
        {"hidden_act": "mish"}, {"rope_theta": None}, {"rope_scaling": 5},
        {"rope_scaling": {"factor": 2, "type": "linear"}},
        ({"rope_scaling": {"type": "ntk"}}, "has no rope_scaling.factor"),
        {"rope_scaling": {"type": "ntk", "factor": 0.5}},
        {"rope_scaling": {"type": "ntk", "factor": 2, "mixed_b": 0.6}},
        ({"rope_scaling": {"type": "ntk", "alpha": 2}}, "rope_scaling.alpha is not supported"),
        ({"num_attention_heads": 64}, "rotate pairs of a head's columns"), {"type_vocab_size": -1},
        {"rope_scaling": None, ROPE: {"factor": 2, "rope_type": "ntk"}},
        ({ROPE: {"rope_type": "default"}}, "rope_scaling.type 'ntk'"),
        {ROPE: {"rope_type": "default"}, "rope_scaling": None, "head_dim": 32},
    ],
    "jina_embeddings_v3": [{"head_dim": 32}],
    "jina_bert_v2": [
        {"feed_forward_type": "swiglu"},
        ({"num_attention_heads": 7}, "hidden_size 48 is not a multiple of num_attention_heads 7"),
        {"is_decoder": True}, {"position_embedding_type": "relative_key"},
        ({"auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--m.M"}}, "auto_map 'jinaai/jina-bert-v2-qk-post"),
    ],
}  # fmt: skip
CASES = [(model, *(row if isinstance(row, tuple) else (row, None))) for model, rows in REFUSED.items() for row in rows]


def config_of(model: str) -> dict[str, Any]:
    if model in OWN:
        return OWN[model]
    prefix, fields = MODEL_CASES[model]
    config: dict[str, Any] = hugging_face(f"{prefix}Config")(**fields).to_dict()
    return config


def named(fields: dict[str, Any]) -> tuple[str, Any]:
    """The path of the last field, and its value."""
    path, value = list(fields.items())[-1]
    while isinstance(value, dict):
        key, value = list(value.items())[-1]
        path += f".{key}"
    return path, value


@pytest.mark.parametrize(("model", "fields", "message"), CASES, ids=str)
def test_error_names_field_and_value(tmp_path: Path, model: str, fields: dict[str, Any], message: str | None) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config_of(model), **fields}))
    with pytest.raises(ModelError) as caught:
        read_config(path)
    error = str(caught.value)
    assert error.startswith(str(path))
    assert "\n" not in error
    if message is not None:
        assert message in error
    else:
        field, value = named(fields)
        assert field in error
        assert repr(value) in error


@pytest.mark.parametrize("missing", ["n_embd", "rotary_emb_fraction", "rotary_emb_base", "layer_norm_epsilon"])
def test_own_spelling_of_nomic_bert_has_no_defaults(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({name: value for name, value in NOMIC.items() if name != missing}))
    with pytest.raises(ModelError, match=f"has no {missing}"):
        read_config(path)
