"""Checkpoints as other people write them: vectors are sentence-transformers', or a field is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, processors

from embert import engine
from embert.engine.batch import TaskOutput
from embert.engine.heads.checkpoints.transformer_module import NAMES
from embert.engine.models import read_config
from embert.engine.tasks import Task
from tests.engine.checkpoints import LONG, SPECIAL, check, unigram, word_piece, write
from tests.oracles.model_cases import MODEL_CASES, hugging_face
from tests.oracles.sentences import logits
from tests.server.models import edit_json

DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}

LENGTH = {"max_seq_length": 16}
OUTPUT = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
POOLER = {"text": {"method": "forward", "method_output_name": "pooler_output"}}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_transformer_modules_file(tmp_path: Path, name: str) -> None:
    """The first that holds anything is read, as in sentence-transformers."""
    files: dict[str, Any] = {each: {} for each in NAMES[: NAMES.index(name)]}
    files |= {name: {**LENGTH, "do_lower_case": True}, "tokenizer_config.json": {"do_lower_case": False}}
    files |= {each: {"max_seq_length": 8} for each in NAMES[NAMES.index(name) + 1 :]}
    check(write(tmp_path / "a", tokenizer=word_piece(lowercase=False), files=files))


@pytest.mark.parametrize(
    "fields",
    [
        {"max_seq_length": 64},  # above the tokenizer's own limit
        {"max_seq_length": None},
        {"max_seq_length": 64, "tokenizer_args": {"model_max_length": 12}},
        {"processing_kwargs": {"text": {"max_length": 6, "truncation": True}}},
        {"processing_kwargs": {"text": {"max_length": 6}, "common": {"max_length": 9, "padding": "max_length"}}},
        {"modality_config": OUTPUT, "module_output_name": "token_embeddings", **LENGTH},
        {"transformer_task": "feature-extraction", "model_args": {"attn_implementation": "eager"}, **LENGTH},
    ],
    ids=str,
)
def test_lengths_and_other_fields_of_the_transformer_module(tmp_path: Path, fields: dict[str, Any]) -> None:
    tokenizer = {"tokenizer_class": "BertTokenizer", "model_max_length": 20}
    check(write(tmp_path / "a", files={"tokenizer_config.json": tokenizer, "sentence_bert_config.json": fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modality_config": POOLER, "module_output_name": "sentence_embedding"}, "method_output_name 'pooler_output'"),
        ({"modality_config": OUTPUT, "module_output_name": "sentence_embedding"}, "module_output_name"),
        ({"modality_config": {"message": {}, **OUTPUT}, "module_output_name": "token_embeddings"}, "message"),
        ({"transformer_task": "text-generation"}, "transformer_task 'text-generation'"),
        ({"processing_kwargs": {"text": {"add_special_tokens": False}}}, "add_special_tokens False"),
        ({"processing_kwargs": {"text": {"truncation": "only_second"}}}, "truncation 'only_second'"),
        ({"config_args": {"num_hidden_layers": 1}}, "config_args.num_hidden_layers 1"),
        ({"model_kwargs": {"variant": "fp16"}}, "model_kwargs.variant 'fp16'"),
        ({"tokenizer_name_or_path": "another"}, "tokenizer_name_or_path 'another'"),
        ({"query_length": 8}, "query_length 8"),
        ({"max_seq_length": -1}, "max_seq_length must be a positive int, found -1"),
        ({"processing_kwargs": {"text": {"max_length": "6"}}}, "max_length must be a positive int, found '6'"),
        ({"modality_config": 3}, "modality_config must be an object, found 3"),
    ],
    ids=str,
)
def test_fields_of_the_transformer_module_that_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    check(write(tmp_path / "a", files={"sentence_bert_config.json": fields}), refusal=message)


def test_dimensions_that_a_model_states(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", files={"config_sentence_transformers.json": {"truncate_dim": 8}})
    check(folder, refusal="truncate_dim 8 is not supported")
    (folder / "config_sentence_transformers.json").write_text('{"max_active_dims": 0}')
    check(folder, refusal="max_active_dims must be a positive int, found 0")


FAST = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}


def stored(tokenizer: Backend) -> Backend:
    """Truncation and padding are in tokenizer.json, and callers of the library set them again."""
    tokenizer.enable_truncation(5, stride=2)
    tokenizer.enable_padding(length=24, direction="left")
    return tokenizer


def lowered_last() -> Backend:
    """Lowercases last, as do_lower_case of sentence-transformers does, unless the tokenizer lowercases already."""
    tokenizer = word_piece(lowercase=False)
    steps = [normalizers.Replace("H", "w"), normalizers.Lowercase()]
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def typed(tokenizer: Backend) -> Backend:
    """Single texts are of the second type."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:1 $A:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


# What is odd → arguments of `write`, and the refusal.
ODD: dict[str, tuple[dict[str, Any], str | None]] = {
    "no layer_norm_eps, and the config's case": (
        {"prefix": "Electra", "without": ["layer_norm_eps", "type_vocab_size", "hidden_act"],
         "files": {"tokenizer_config.json": {"tokenizer_class": "ElectraTokenizer", "do_lower_case": False}}},
        None,
    ),
    "max_len, the older name": (
        {"prefix": "DistilBert", "tokenizer": word_piece(lowercase=False), **DISTILBERT,
         "files": {"tokenizer_config.json": {"max_len": 12}, "sentence_bert_config.json": None}},
        None,
    ),
    "the left end of SentencePiece's tokens": (
        {"prefix": "XLMRoberta", "tokenizer": unigram(), "files": {
            "tokenizer_config.json": {"truncation_side": "left", "add_prefix_space": False},
            "sentence_bert_config.json": {}, "sentence_xlm-roberta_config.json": {"max_seq_length": 20}}},
        None,
    ),
    "a Lowercase that is there already": (
        {"tokenizer": lowered_last(), "files": {
            "tokenizer_config.json": FAST, "sentence_bert_config.json": {"do_lower_case": True}}},
        None,
    ),
    "tokenizer_args": (
        {"files": {"sentence_bert_config.json": {
            "max_seq_length": 30, "tokenizer_args": {"do_lower_case": False, "strip_accents": False}}}},
        None,
    ),
    "no limit": (
        {"files": {"tokenizer_config.json": {"model_max_length": 10**30}, "sentence_bert_config.json": None}}, None,
    ),
    "truncation and padding of tokenizer.json": ({"tokenizer": stored(word_piece())}, None),
    "modules that do nothing, and prompts that are empty": (
        {"further": [("2_Dropout", "Dropout")], "files": {
            "2_Dropout/config.json": {"dropout": 0.5},
            "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_cls_token": True,
                                      "pooling_mode_mean_tokens": False, "include_prompt": False},
            "config_sentence_transformers.json": {"prompts": {"query": "", "document": ""}}}},
        None,
    ),
    "rotary positions by default": (
        {"prefix": "NomicBert", "without": ["rope_parameters", "hidden_act"],
         "files": {"tokenizer_config.json": {}}},
        None,
    ),
    "a class that transformers does not trust": (
        {"prefix": "ModernBert", "tokenizer": word_piece(lowercase=False), "pad_token_id": 0, "without": ["norm_eps"],
         "files": {"tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **SPECIAL}}},
        None,
    ),
    "single texts of the second type": (
        {"tokenizer": typed(word_piece()), "files": {
            "tokenizer_config.json": {**FAST, "model_input_names": ["input_ids", "token_type_ids"]}}},
        "token type 1",
    ),
    "the same, which the model is not told": (
        {"tokenizer": typed(word_piece()), "files": {"tokenizer_config.json": FAST}}, None,
    ),
    "old flags of pooling, and a width that is not there": (
        {"files": {"1_Pooling/config.json": {
            "pooling_mode_mean_tokens": False, "pooling_mode_weightedmean_tokens": True, "pooling_mode_cls_token": True,
            "pooling_mode_lasttoken": True, "word_embedding_dimension": 7}}},
        None,
    ),
    "a mode of pooling and flags that contradict it": (
        {"files": {"1_Pooling/config.json": {
            "pooling_mode": "max", "pooling_mode_cls_token": True, "embedding_dimension": 32}}}, None,
    ),
    "no modules": ({"files": {"modules.json": []}}, "modules.json must list objects"),
    "a module outside of the folder": (
        {"files": {"modules.json": [{"path": "../b", "type": "sentence_transformers.models.Transformer"}]}},
        "modules.json names '../b', which is not in its folder",
    ),
    "a module by its path on this machine": (
        {"files": {"modules.json": [{"path": "/b", "type": "sentence_transformers.models.Transformer"}]}},
        "modules.json names '/b', which is not in its folder",
    ),
    "more positions than memory": (
        {"prefix": "NomicBert", "edit": {"max_position_embeddings": 10**9},
         "files": {"tokenizer_config.json": {}, "sentence_bert_config.json": None}},
        "texts of up to 1000000000 tokens, and tables of 32000000000 bytes for their positions",
    ),
    "more positions than the longest text has": (
        {"prefix": "NomicBert", "edit": {"max_position_embeddings": 10**7}, "files": {"tokenizer_config.json": {}}},
        None,
    ),
    "code of somebody's own under the name of jina's": (
        {"files": {"modules.json": [{"path": "", "type": "custom_st.Transformer"}]}}, "module custom_st.Transformer",
    ),
    "heads that are pruned": ({"edit": {"pruned_heads": {"0": [1]}}}, "pruned_heads"),
    "a mask of later tokens": ({"edit": {"is_causal": True}}, "is_causal True"),
    "a mask of later tokens in EuroBERT": (
        {"prefix": "EuroBert", "num_key_value_heads": 2, "pad_token_id": 0, "files": {"tokenizer_config.json": FAST},
         "edit": {"is_causal": True}}, "is_causal True",
    ),
    "quantized weights": ({"edit": {"quantization_config": {"quant_method": "awq"}}}, "quantization_config"),
    "version 4's spelling of rotary positions": (
        {"prefix": "JinaEmbeddingsV3", "files": {"tokenizer_config.json": FAST}, "edit": {
            "rope_parameters": None, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 3.0}}},
        None,
    ),
    "rotary positions that are scaled": (
        {"prefix": "Gte", "files": {"tokenizer_config.json": FAST}, "edit": {"rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}}},
        None,
    ),
    "texts longer than max_position_embeddings": (
        {"prefix": "NomicBert", "max_position_embeddings": 30, "files": {
            "tokenizer_config.json": FAST, "sentence_bert_config.json": {"max_seq_length": 50}}},
        None,
    ),
    "the same by distances": (
        {"prefix": "DebertaV2", "max_position_embeddings": 30, "position_biased_input": False,
         "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "files": {
             "tokenizer_config.json": FAST, "sentence_bert_config.json": {"max_seq_length": 50}}},
        None,
    ),
    "special tokens without a name, and a prompt that is not pooled": (
        {"files": {
            "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"},
            "1_Pooling/config.json": {"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": False},
            "config_sentence_transformers.json": {"prompts": {"query": "the "}, "default_prompt_name": "query"}}},
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_checkpoints(tmp_path: Path, name: str) -> None:
    arguments, refusal = ODD[name]
    folder = write(tmp_path / "a", **{key: value for key, value in arguments.items() if key != "edit"})
    edit_json(folder / "config.json", **arguments.get("edit", {}))  # as transformers would not write it
    check(folder, refusal=refusal)


@pytest.mark.parametrize(
    ("name", "pooling"),
    [
        ("BertForTokenClassification", "cls"),
        ("BertForQuestionAnswering", "weightedmean"),
        ("BertForSequenceClassification", "cls"),
        ("BertForPreTraining", None),
    ],
)
def test_checkpoints_of_classes_with_a_head(tmp_path: Path, name: str, pooling: str | None) -> None:
    files = {"1_Pooling/config.json": {"pooling_mode": pooling, "embedding_dimension": 32}}
    folder = write(tmp_path / "a", head=name.removeprefix("Bert"), files=files if pooling else {"modules.json": None})
    check(folder)


Weights = dict[str, torch.Tensor]


def named_by_tensorflow(weights: Weights) -> Weights:
    """Under a prefix, with buffers."""
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in weights.items():
        for new, old in names.items():
            name = name.replace(new, old)
        renamed[f"bert.{name}"] = tensor
    return renamed | {"bert.embeddings.position_ids": torch.arange(66)[None]}


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda weights: weights | {"vision_model.patch.weight": torch.ones(3, 3), "scale": torch.ones(())}, None),
        (named_by_tensorflow, None),
        (
            lambda weights: weights | {"encoder.layer.0.attention.self.scale": torch.ones(1)},
            "encoder.layer.0.attention.self.scale",
        ),
    ],
    ids=["another model's tensors", "TensorFlow's names", "a layer's tensor that no config names"],
)
def test_further_tensors_and_old_names(
    tmp_path: Path, change: Callable[[Weights], Weights], refusal: str | None
) -> None:
    path = write(tmp_path / "a") / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})
    check(tmp_path / "a", refusal=refusal)


PAIRS = [("hello world", "the cat"), ("hello", LONG), (LONG, "cat"), (LONG, LONG[:60]), ("", "café")]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"truncation_side": "left"},
        {"model_input_names": ["input_ids", "attention_mask"]},
        {**FAST, "model_max_length": 20},  # the class of version 5 gives no token types unless they are named
        {"tokenizer_class": "DistilBertTokenizer"},
    ],
    ids=str,
)
def test_pairs_of_odd_tokenizers(tmp_path: Path, fields: dict[str, Any]) -> None:
    files = dict.fromkeys(("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"))
    folder = write(
        tmp_path / "a",
        head="ForSequenceClassification",
        num_labels=1,
        max_position_embeddings=40,
        files={**files, "tokenizer_config.json": {"model_max_length": 30, **fields}},
    )
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        np.testing.assert_allclose(loaded.score(PAIRS, raw=True), logits(folder, PAIRS), atol=1e-5)


@pytest.mark.parametrize("model_type", [name for name in MODEL_CASES if "," not in name])
def test_config_without_fields_has_the_defaults_of_transformers(tmp_path: Path, model_type: str) -> None:
    fields = hugging_face(MODEL_CASES[model_type][0] + "Config")().to_dict()
    (tmp_path / "all.json").write_text(json.dumps(fields))
    told = {"hidden_size": 768} if model_type == "nomic_bert" else {}  # the older code's files lack it
    (tmp_path / "none.json").write_text(json.dumps({"model_type": model_type, **told}))
    assert read_config(tmp_path / "none.json") == read_config(tmp_path / "all.json")


def test_largest_weights_of_sparse_vectors() -> None:
    values = np.array([1, 3, 2, 5, np.nan, 4, 9], np.float32).reshape(-1, 1)
    rows = TaskOutput(values, np.array([0, 3, 3, 6, 7], np.int32), np.array([4, 6, 8, 1, 2, 3, 0], np.int32)).largest(2)
    assert rows.offsets.tolist() == [0, 2, 2, 4, 5]
    assert rows.indices is not None
    assert rows.indices.tolist() == [6, 8, 1, 2, 0]
    np.testing.assert_array_equal(rows.values[:, 0], [3, 2, 5, np.nan, 9])


def written(folder: Path, name: str) -> Path:
    """A model of this class of transformers."""
    prefix = name.partition("For")[0].removesuffix("Model")
    files = {"modules.json": None, "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"}}
    return write(folder / "a", prefix=prefix, head=name.removeprefix(prefix), files=files)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("BertForPreTraining", "cls ("),
        ("RobertaForQuestionAnswering", "qa_outputs (2)"),
        ("ElectraForPreTraining", "discriminator_predictions (4)"),
    ],
)
def test_head_that_is_not_served(tmp_path: Path, name: str, group: str) -> None:
    model = engine.load_model(str(written(tmp_path, name)))
    assert model.tasks == Task.EMBED | Task.TOKENS
    (unused,) = (notice for notice in model.notices if "nothing uses" in notice)
    (pooling,) = (notice for notice in model.notices if "pooling" in notice and notice != unused)
    assert pooling.endswith(f"architectures of config.json: {name}")
    assert f"has tensors that nothing uses: {group}" in unused or f", {group}" in unused
    assert name in unused
    assert "pooled by mean" in unused


@pytest.mark.parametrize(
    ("name", "pooling"),
    [
        ("BertModel", None),
        ("RobertaModel", None),
        ("BertForSequenceClassification", None),
        ("BertForMaskedLM", "splade"),
    ],
)
def test_served_head_gives_no_warning(tmp_path: Path, name: str, pooling: str | None) -> None:
    notices = engine.load_model(str(written(tmp_path, name)), pooling=pooling).notices
    assert not any("nothing uses" in notice or "architectures" in notice for notice in notices)
