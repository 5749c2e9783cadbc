"""Checkpoints with a head that is not served: the start-up log names its tensors and the model's class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from embert import engine
from embert.engine.tasks import Task
from tests.engine.conftest import HuggingFace, random_sequences, small_tokenizer

SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 66,
}  # fmt: skip


def save(folder: Path, name: str) -> Path:
    """A model of this class of transformers with random weights."""
    prefix = name.partition("For")[0].removesuffix("Model")
    torch.manual_seed(0)
    model: Any = getattr(transformers, name)(getattr(transformers, f"{prefix}Config")(**SHAPE, initializer_range=0.3))
    model.save_pretrained(folder)
    small_tokenizer(64).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("BertForPreTraining", "cls ("),
        ("RobertaForQuestionAnswering", "qa_outputs (2)"),
        ("ElectraForPreTraining", "discriminator_predictions (4)"),
    ],
)
def test_head_that_is_not_served(tmp_path: Path, name: str, group: str) -> None:
    model = engine.load_model(str(save(tmp_path, name)))
    assert model.tasks == Task.EMBED | Task.TOKENS
    (unused,) = (notice for notice in model.notices if "nothing uses" in notice)
    (pooling,) = (notice for notice in model.notices if "pooling" in notice and notice != unused)
    assert pooling.endswith(f"architectures of config.json: {name}")
    assert f"has tensors that nothing uses: {group}" in unused or f", {group}" in unused
    assert name in unused
    assert "pooled by mean" in unused
    (ids,) = random_sequences([9], 64)
    found = engine.load_encoder(model, device="cpu").encode(engine.pack([ids]))[0]
    wanted = HuggingFace(tmp_path).pooled(ids, "mean")
    assert found @ wanted >= (1 - 1e-6) * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("name", "pooling"),
    [
        ("BertModel", None),
        ("RobertaModel", None),
        ("BertForSequenceClassification", None),
        ("BertForMaskedLM", "splade"),
    ],
)
def test_head_that_is_served_is_no_warning(tmp_path: Path, name: str, pooling: str | None) -> None:
    notices = engine.load_model(str(save(tmp_path, name)), pooling=pooling).notices
    assert not any("nothing uses" in notice or "architectures" in notice for notice in notices)
