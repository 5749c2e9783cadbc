"""Engine.score, rerank and classify compared with sentence-transformers' CrossEncoder, from its own folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import processors

from embert import engine
from tests.engine.conftest import small_tokenizer
from tests.engine.heads.classifiers import build_classifier
from tests.oracles.model_cases import byte_level
from tests.oracles.sentences import cross_encoder

QUESTION = "how do cats purr"
PASSAGES = [
    "the cat purrs with its larynx",
    "a tax form is due in may",
    "",
    "cats",
    "dogs bark and cats purr, " * 20,  # cut
    *(f"text {number} of many, about {word}" for number in range(8) for word in ("cats", "tax", "dogs")),
]


def saved(folder: Path, case: str, labels: int) -> tuple[Path, Any]:
    """A folder that CrossEncoder has written, and the CrossEncoder."""
    built = folder / "transformers"
    build_classifier(built, case, labels=labels, vocab_size=400 if case != "bert" else 99)
    backend = small_tokenizer(99)
    if case != "bert":
        backend = byte_level(400)
        backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    special = {
        "bert": {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"},
        "modernbert": {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"},
        "roberta": {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"},
    }[case]
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if case == "bert" else [])]
    fast: Any = transformers.PreTrainedTokenizerFast
    fast(tokenizer_object=backend, model_max_length=100, model_input_names=names, **special).save_pretrained(built)
    oracle = cross_encoder(built)
    oracle.save_pretrained(str(folder / "saved"))
    return folder / "saved", oracle


@pytest.mark.parametrize("case", ["bert", "roberta", "modernbert"])
def test_one_label(tmp_path: Path, case: str) -> None:
    folder, theirs = saved(tmp_path, case, 1)
    pairs = [(QUESTION, text) for text in PASSAGES]
    expected = theirs.predict(pairs)
    logits = theirs.predict(pairs, activation_fn=torch.nn.Identity())
    with engine.Engine.load(str(folder), device="cpu") as ours:
        np.testing.assert_allclose(ours.score(pairs), expected, atol=2e-5, rtol=0)
        np.testing.assert_allclose(ours.score(pairs, raw=True), logits, atol=1e-4, rtol=0)
        ranked = ours.rerank(QUESTION, PASSAGES)
    theirs_ranked = theirs.rank(QUESTION, PASSAGES)
    assert [each.index for each in ranked] == [each["corpus_id"] for each in theirs_ranked]
    np.testing.assert_allclose([r.score for r in ranked], [float(r["score"]) for r in theirs_ranked], atol=2e-5)


def test_activation_of_the_models_own_and_a_prompt(tmp_path: Path) -> None:
    _, theirs = saved(tmp_path, "bert", 1)
    theirs.activation_fn = torch.nn.Identity()
    theirs.prompts, theirs.default_prompt_name = {"q": "find : "}, "q"
    theirs.save_pretrained(str(tmp_path / "again"))
    pairs = [(QUESTION, text) for text in PASSAGES]
    with engine.Engine.load(str(tmp_path / "again"), device="cpu") as ours:
        np.testing.assert_allclose(ours.score(pairs), theirs.predict(pairs), atol=1e-4, rtol=0)
        assert [r.index for r in ours.rerank(QUESTION, PASSAGES)] == [r["corpus_id"] for r in theirs.rank(QUESTION, PASSAGES)]


def test_several_labels(tmp_path: Path) -> None:
    folder, theirs = saved(tmp_path, "bert", 3)
    assert json.loads((folder / "config_sentence_transformers.json").read_text())["activation_fn"].endswith("Identity")
    pairs = [(QUESTION, text) for text in PASSAGES]

    def rows(found: list[list[Any]]) -> list[list[float]]:
        return [[next(e.score for e in each if e.label == f"label {i}") for i in range(3)] for each in found]

    with engine.Engine.load(str(folder), device="cpu") as ours:
        # CrossEncoder gives logits unless asked for more; ours are raw if asked for.
        np.testing.assert_allclose(rows(ours.classify(pairs, raw=True)), theirs.predict(pairs), atol=1e-4, rtol=0)
        expected = theirs.predict(pairs, apply_softmax=True)
        np.testing.assert_allclose(rows(ours.classify(pairs)), expected, atol=2e-5, rtol=0)
