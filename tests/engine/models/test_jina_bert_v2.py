"""JinaBERT v2, for which transformers has no class: its formulas in float64, written here from its authors' code."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from embert import engine
from embert.engine.errors import BrokenModel
from embert.engine.tasks import Task
from tests.engine.conftest import random_sequences, small_tokenizer
from tests.engine.heads.classifiers import check_bert_classifier
from tests.oracles.exact import cosines, near
from tests.oracles.jina_bert_v2 import HIDDEN, VOCABULARY, JinaBert
from tests.oracles.model_cases import byte_level
from tests.server.models import edit_json


@pytest.mark.parametrize(("kind", "heads"), [("geglu", 6), ("geglu", 12), ("reglu", 8), ("original", 1)])
def test_hidden_states(tmp_path: Path, kind: str, heads: int) -> None:
    reference = JinaBert(tmp_path, kind=kind, heads=heads)
    sequences = random_sequences([1, 2, 17, 33, 64, 65, 128, 300, 5, 1100], VOCABULARY)
    expected = list(map(reference.hidden, sequences))
    assert near(tmp_path, sequences, expected) >= 0.999999
    assert near(tmp_path, sequences, expected, dtype="bfloat16") >= 0.995
    model = engine.load_model(str(tmp_path))
    assert (model.config.model_type, model.config.max_positions) == ("jina_bert_v2", 8192)
    types = random_sequences([17], 2, seed=1)
    encoder = engine.load_encoder(model, device="cpu")
    ours = encoder.encode(engine.pack(sequences[2:3], token_types=types), Task.TOKENS)
    assert cosines(ours, reference.hidden(sequences[2], types[0])).min() >= 0.999999


def test_classifier_under_a_prefix(tmp_path: Path) -> None:
    """A reranker's file: the encoder under "bert.", BERT's pooler, and a classifier."""
    reference = JinaBert(tmp_path, architectures=["JinaBertForSequenceClassification"], num_labels=1)
    (tmp_path / "modules.json").unlink()
    small_tokenizer(VOCABULARY).save(str(tmp_path / "tokenizer.json"))
    save = functools.partial(reference.save, "bert.")
    check_bert_classifier(tmp_path, save, reference.hidden, HIDDEN, 1, VOCABULARY)


def test_query_norms_in_the_weights_are_refused(tmp_path: Path) -> None:
    reference = JinaBert(tmp_path)
    byte_level(300).save(str(tmp_path / "tokenizer.json"))
    name = "encoder.layer.0.attention.self.layer_norm_q.weight"
    reference.save(more={name: torch.ones(HIDDEN)})
    with pytest.raises(BrokenModel, match=f"has a tensor {name}, which config.json does not describe"):
        engine.load_encoder(engine.load_model(str(tmp_path)), device="cpu")
    edit_json(tmp_path / "config.json", feed_forward_type="original")
    with pytest.raises(BrokenModel, match=r"has no tensor encoder\.layer\.0\.intermediate\.dense\.weight"):
        engine.load_encoder(engine.load_model(str(tmp_path)), device="cpu")
