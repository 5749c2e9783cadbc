"""ELECTRA and ALBERT: embeddings narrower than the layers, and layers that share weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embert import engine
from embert.engine.encoders.cuda.shapes import head_shapes
from embert.engine.errors import BrokenModel, ModelError, UnsupportedModel
from embert.engine.models import read_config
from tests.engine.conftest import random_sequences
from tests.engine.model_cases import build, byte_level
from tests.engine.models.exact import hidden_states, near
from tests.server.models import edit_json


@pytest.mark.parametrize(
    ("turns", "groups", "inner", "numbers"),
    [
        (3, 1, 1, (0, 0, 0)),
        (5, 2, 2, (0, 1, 0, 1, 0, 1, 2, 3, 2, 3)),
        (4, 3, 1, (0, 0, 1, 2)),
        (2, 2, 1, (0, 1)),
    ],
)
def test_layers_that_share_weights(
    tmp_path: Path, turns: int, groups: int, inner: int, numbers: tuple[int, ...]
) -> None:
    folder = build(
        tmp_path, "albert", num_hidden_layers=turns, num_hidden_groups=groups, inner_group_num=inner, hidden_act="relu"
    )
    read = read_config(folder / "config.json")
    assert (read.layers, read.shared_layers, read.activation) == (len(numbers), numbers, "relu")
    sequences = random_sequences([1, 30, 70], 60)
    assert near(folder, sequences, hidden_states(folder, sequences)) >= 0.999999


def test_fields_that_old_files_lack(tmp_path: Path) -> None:
    folder = build(tmp_path, "albert")
    expected = read_config(folder / "config.json")
    edit_json(folder / "config.json", num_hidden_groups=None, inner_group_num=None, hidden_act=None)
    assert read_config(folder / "config.json") == expected
    assert expected.activation == "gelu_tanh"


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("electra", {"embedding_size": 0}, "config.json: embedding_size must be a positive int, found 0"),
        (
            "electra",
            {"embedding_size": 64},
            "embeddings.word_embeddings.weight has shape [64, 24], config.json implies",
        ),
        ("electra", {"hidden_act": "swish"}, "config.json: hidden_act 'swish' is not supported; supported: 'gelu'"),
        ("electra", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key' is not supp"),
        ("electra", {"is_decoder": True}, "config.json: is_decoder True is not supported; supported: False"),
        ("electra, as wide", {"embedding_size": 32}, "word_embeddings.weight has shape [64, 64], config.json implies"),
        ("albert", {"num_hidden_groups": 3}, "num_hidden_groups must be at most num_hidden_layers, 2; found 3"),
        ("albert", {"num_hidden_groups": 0}, "config.json: num_hidden_groups must be a positive int, found 0"),
        ("albert", {"inner_group_num": True}, "config.json: inner_group_num must be a positive int, found True"),
        (
            "albert",
            {"num_hidden_groups": 2},
            "no tensor encoder.albert_layer_groups.1.albert_layers.0.attention.query.",
        ),
        ("albert, groups", {"inner_group_num": 1}, "has a tensor encoder.albert_layer_groups.0.albert_layers.1."),
        ("albert, groups", {"num_hidden_groups": 1}, "has a tensor encoder.albert_layer_groups.1.albert_layers.0."),
    ],
)
def test_what_is_refused_by_name(tmp_path: Path, family: str, fields: dict[str, Any], message: str) -> None:
    folder = build(tmp_path, family)
    byte_level(300).save(str(folder / "tokenizer.json"))
    edit_json(folder / "config.json", **fields)
    with pytest.raises(ModelError) as caught:
        engine.load_encoder(engine.load_model(str(folder)), device="cpu")
    assert message in str(caught.value)


@pytest.mark.parametrize("family", ["electra", "albert"])
def test_a_file_without_the_width_of_its_embeddings(tmp_path: Path, family: str) -> None:
    path = build(tmp_path, family) / "config.json"
    edit_json(path, embedding_size=None)
    with pytest.raises(BrokenModel, match=r"config\.json: embedding_size must be a positive int, found None"):
        read_config(path)


def test_what_the_cuda_encoder_refuses(tmp_path: Path) -> None:
    folder = build(tmp_path, "electra", head="ForMaskedLM", modules=False)
    byte_level(300).save(str(folder / "tokenizer.json"))
    with pytest.raises(UnsupportedModel) as caught:
        head_shapes(engine.load_model(str(folder), pooling="splade"))
    assert str(caught.value) == (
        f"{folder} has a sparse head of 24 columns on hidden states of 64, which the CUDA encoder does not run"
    )
