"""Checkpoints with a head that is not served: the start-up log names its tensors and the model's class.

test_checkpoints.py has their vectors.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from embert import engine
from embert.engine.tasks import Task
from tests.engine.checkpoints import write


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
def test_head_that_is_served_is_no_warning(tmp_path: Path, name: str, pooling: str | None) -> None:
    notices = engine.load_model(str(written(tmp_path, name)), pooling=pooling).notices
    assert not any("nothing uses" in notice or "architectures" in notice for notice in notices)
