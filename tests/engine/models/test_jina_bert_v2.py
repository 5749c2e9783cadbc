"""JinaBERT v2, for which transformers has no class: its formulas in float64, written here from its authors' code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from embert import engine
from embert.engine.errors import BrokenModel
from embert.engine.tasks import Task
from tests.engine.conftest import random_sequences, small_tokenizer
from tests.oracles.exact import cosines, near
from tests.oracles.jina_bert_v2 import HIDDEN, VOCABULARY, JinaBert
from tests.oracles.model_cases import byte_level
from tests.server.models import edit_json


@pytest.mark.parametrize(("kind", "heads"), [("geglu", 6), ("geglu", 12), ("reglu", 8), ("original", 1)])
def test_hidden_states(tmp_path: Path, kind: str, heads: int) -> None:
    reference = JinaBert(tmp_path, kind=kind, heads=heads)
    sequences = random_sequences([1, 2, 17, 33, 64, 65, 128, 300, 5], VOCABULARY)
    assert near(tmp_path, sequences, list(map(reference.hidden, sequences))) >= 0.999999
    model = engine.load_model(str(tmp_path))
    assert (model.config.model_type, model.config.max_positions) == ("jina_bert_v2", 8192)
    types = random_sequences([17], 2, seed=1)
    encoder = engine.load_encoder(model, device="cpu")
    ours = encoder.encode(engine.pack(sequences[2:3], token_types=types), Task.TOKENS)
    assert cosines(ours, reference.hidden(sequences[2], types[0])).min() >= 0.999999


@pytest.mark.parametrize(("dtype", "cosine"), [("float32", 0.999999), ("bfloat16", 0.995)])
def test_long_texts(tmp_path: Path, dtype: str, cosine: float) -> None:
    reference = JinaBert(tmp_path)
    sequences = random_sequences([1100, 20], VOCABULARY)
    assert near(tmp_path, sequences, list(map(reference.hidden, sequences)), dtype=dtype) >= cosine


def test_classifier_under_a_prefix(tmp_path: Path) -> None:
    """A reranker's file: the encoder under "bert.", BERT's pooler, and a classifier."""
    reference = JinaBert(tmp_path, architectures=["JinaBertForSequenceClassification"], num_labels=1)
    (tmp_path / "modules.json").unlink()
    small_tokenizer(VOCABULARY).save(str(tmp_path / "tokenizer.json"))
    drawn = torch.Generator().manual_seed(3)
    shapes = {
        "bert.pooler.dense.weight": (HIDDEN, HIDDEN),
        "bert.pooler.dense.bias": (HIDDEN,),
        "classifier.bias": (1,),
    }
    head = {name: torch.randn(*shape, generator=drawn) for name, shape in shapes.items()}
    head["classifier.weight"] = torch.randn(1, HIDDEN, generator=drawn)
    reference.save("bert.", head)
    sequences = random_sequences([4, 40], VOCABULARY)
    logits = engine.load_encoder(engine.load_model(str(tmp_path)), device="cpu").encode(
        engine.pack(sequences), Task.CLASSIFY
    )
    exact = {name: tensor.double().numpy() for name, tensor in head.items()}
    for ours, ids in zip(logits, sequences, strict=True):
        pooled = np.tanh(exact["bert.pooler.dense.weight"] @ reference.hidden(ids)[0] + exact["bert.pooler.dense.bias"])
        np.testing.assert_allclose(ours, exact["classifier.weight"] @ pooled + exact["classifier.bias"], atol=1e-4)


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
