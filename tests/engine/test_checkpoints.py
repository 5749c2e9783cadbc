"""Checkpoints as other people write them: vectors are sentence-transformers', or a field is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from embert.engine.families import read_architecture
from embert.engine.heads.checkpoints.transformer_module import NAMES
from embert.engine.rows import Rows
from tests.engine.checkpoints import check, word_piece, write
from tests.engine.families import FAMILIES

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


@pytest.mark.parametrize("family", [name for name in FAMILIES if "," not in name])
def test_a_config_without_fields_has_the_defaults_of_transformers(tmp_path: Path, family: str) -> None:
    fields = getattr(transformers, FAMILIES[family][0] + "Config")().to_dict()
    (tmp_path / "all.json").write_text(json.dumps(fields))
    told = {"hidden_size": 768} if family == "nomic_bert" else {}  # the older code's files lack it
    (tmp_path / "none.json").write_text(json.dumps({"model_type": family, **told}))
    assert read_architecture(tmp_path / "none.json") == read_architecture(tmp_path / "all.json")


def test_the_largest_weights_of_sparse_vectors() -> None:
    values = np.array([1, 3, 2, 5, np.nan, 4, 9], np.float32).reshape(-1, 1)
    rows = Rows(values, np.array([0, 3, 3, 6, 7], np.int32), np.array([4, 6, 8, 1, 2, 3, 0], np.int32)).largest(2)
    assert rows.offsets.tolist() == [0, 2, 2, 4, 5]
    assert rows.indices is not None
    assert rows.indices.tolist() == [6, 8, 1, 2, 0]
    np.testing.assert_array_equal(rows.values[:, 0], [3, 2, 5, np.nan, 9])
