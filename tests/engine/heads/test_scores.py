"""Scores of logits, and Engine.score, rerank and classify: compared with torch and CrossEncoder, and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import load_file, save_file

from embert import engine
from embert.engine.errors import EncoderError, InputError
from embert.engine.heads.scores import LabelScore, Ranked, best_labels, rank, scores
from tests.engine.conftest import Floats
from tests.engine.heads.classifiers import build_classifier, hugging_face_logits
from tests.oracles.pipelines import write
from tests.oracles.sentences import cross_encoder

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
LOGITS = arrays.arrays(np.float32, st.tuples(st.integers(0, 5), st.integers(1, 6)), elements=finite)


@given(LOGITS)
def test_scores_equal_torch_and_keep_the_order(logits: Floats) -> None:
    given = torch.from_numpy(logits).double()
    expected = {"sigmoid": given.sigmoid(), "softmax": given.softmax(-1), "identity": given}
    for activation, wanted in expected.items():
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            got = scores(logits, activation)
        assert got.dtype == np.float32
        assert got.shape == logits.shape
        np.testing.assert_allclose(got, wanted.float().numpy(), rtol=1e-6)
        by_logit = np.argsort(logits, axis=1)
        assert (np.diff(np.take_along_axis(got, by_logit, 1)) >= 0).all()


def test_best_come_first_and_equals_in_their_order() -> None:
    logits = np.array([1, 40, 30, 40, -200], np.float32)
    assert [each.index for each in rank(logits, "sigmoid")] == [1, 3, 2, 0, 4]  # also where scores are both 1
    assert rank(logits, "identity", 2) == [Ranked(1, 40.0), Ranked(3, 40.0)]
    assert rank(logits[:0], "sigmoid") == []
    assert best_labels(np.array([[1, 2, 2], [3, 0, -1]], np.float32), "identity", "abc") == [
        [LabelScore("b", 2.0), LabelScore("c", 2.0), LabelScore("a", 1.0)],
        [LabelScore("a", 3.0), LabelScore("b", 0.0), LabelScore("c", -1.0)],
    ]


QUERY = "who purrs"
TEXTS = ["a cat", "", "a tax form " * 9, "cats purr", "a cat", "x " * 200]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Models by their number of labels."""
    made = {labels: build_classifier(tmp_path_factory.mktemp("model"), labels=labels) for labels in (1, 3)}
    return made.__getitem__


@pytest.fixture(scope="module")
def reranker(folder: Callable[[int], Path]) -> engine.Engine:
    return engine.Engine.load(str(folder(1)), device="cpu")


@pytest.fixture(scope="module")
def classifier(folder: Callable[[int], Path]) -> engine.Engine:
    return engine.Engine.load(str(folder(3)), device="cpu")


def test_scores_are_in_the_order_of_the_pairs_however_they_are_batched(
    reranker: engine.Engine, folder: Callable[[int], Path]
) -> None:
    encoded = reranker.tokenizer.encode_pairs([QUERY], TEXTS)
    assert encoded.token_types is not None
    cuts = np.cumsum(encoded.lengths)[:-1]
    expected = hugging_face_logits(folder(1), np.split(encoded.ids, cuts), np.split(encoded.token_types, cuts))[:, 0]
    pairs = [(QUERY, text) for text in TEXTS]
    done: list[int] = []
    logits = reranker.score(pairs, raw=True, batch_tokens=128, progress=done.append)
    assert logits.dtype == np.float32
    assert (logits.shape, sum(done), len(done) > 1) == ((6,), 6, True)
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
    np.testing.assert_allclose(reranker.score(pairs), 1 / (1 + np.exp(-expected)), atol=2e-5, rtol=0)
    assert reranker.score([]).shape == (0,)


def test_model_of_one_label_classifies_too(reranker: engine.Engine) -> None:
    ((only,),) = reranker.classify([(QUERY, "a cat")])
    assert only.label == "label 0"
    assert only.score == pytest.approx(float(reranker.score([(QUERY, "a cat")])[0]), abs=1e-6)


@pytest.mark.parametrize(
    ("asked", "message", "param"),
    [
        (lambda e: e.score([("a", "b", "c")]), "`pairs`: pair 0 must be two texts, found 3", "pairs"),
        (lambda e: e.score([("a", "b"), "ab"]), "`pairs`: pair 1 must be two texts, found one", "pairs"),
        (lambda e: e.score([("a", 1)]), "`pairs`: a text of pair 0 must be a string, found int", "pairs"),
        (lambda e: e.score("ab"), "`pairs` must be a list, found one str", "pairs"),
        (lambda e: e.classify("ab"), "`texts` must be a list, found one str", "texts"),
        (lambda e: e.classify(["a", 2]), "`texts`: pair 1 must be two texts, found one int", "texts"),
        (lambda e: e.rerank(["a"], ["b"]), "`query` must be a string, found list", "query"),
        (lambda e: e.rerank("a", "bc"), "`texts` must be a list, found one str", "texts"),
        (lambda e: e.rerank("a", ["b", None]), "`texts`: text 1 must be a string, found NoneType", "texts"),
        (lambda e: e.rerank("a", ["b"], top_n="1"), "`top_n` must be at least 1, found '1'", "top_n"),
        (lambda e: e.classify(["ab", ("a",)]), "`texts`: pair 1 must be two texts, found 1", "texts"),
        (lambda e: e.rerank("a", ["b"], top_n=0), "`top_n` must be at least 1, found 0", "top_n"),
        (lambda e: e.score([("a", "b")], raw="false"), "`raw` must be True or False, found 'false'", "raw"),
        (lambda e: e.rerank("a", ["b"], truncate=None), "`truncate` must be True or False, found None", "truncate"),
        (
            lambda e: e.score([("a", "b")], prompt_name="q"),
            "`prompt_name` 'q' is not known; this model's p",
            "prompt_name",
        ),
        (
            lambda e: e.score([("a", "b " * 200)], truncate=False),
            "`pairs`: pair 0 has 204 tokens, the limit is",
            "pairs",
        ),
        (lambda e: e.embed(["a"]), "`texts`: FOLDER does not have the task embed; it has classify", "texts"),
    ],
)
def test_wrong_input(reranker: engine.Engine, asked: Callable[[engine.Engine], Any], message: str, param: str) -> None:
    with pytest.raises(InputError) as caught:
        asked(reranker)
    assert str(caught.value).startswith(message.replace("FOLDER", reranker.model.model_id))
    assert caught.value.param == param


def test_several_labels_have_no_score(classifier: engine.Engine) -> None:
    for ask in (lambda: classifier.score([("a", "b")]), lambda: classifier.rerank("a", ["b"])):
        with pytest.raises(InputError, match=r"one label, and .* has 3"):
            ask()


def test_logits_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = build_classifier(tmp_path) / "model.safetensors"
    save_file({**load_file(path), "classifier.bias": torch.tensor([0.0, torch.nan, 0.0])}, path)
    with (
        engine.Engine.load(str(tmp_path), device="cpu") as loaded,
        pytest.raises(EncoderError, match="not finite, for text 0"),
    ):
        loaded.classify(["a cat"])


ASKED = "how do cats purr"
RANKED = [
    "the cat purrs with its larynx",
    "a tax form is due in may",
    "",
    "cats",
    "dogs bark and cats purr, " * 20,  # cut
    *(f"text {number} of many, about {word}" for number in range(8) for word in ("cats", "tax", "dogs")),
]


def saved(folder: Path, case: str) -> tuple[Path, Any]:
    """A folder that CrossEncoder has written, and the CrossEncoder."""
    tokenizer = "cased" if case == "bert" else "byte level"
    oracle = cross_encoder(write(folder / "transformers", tokenizer, case, "ForSequenceClassification", ["relevance"]))
    oracle.save_pretrained(str(folder / "saved"))
    return folder / "saved", oracle


@pytest.mark.parametrize("case", ["bert", "roberta", "modernbert"])
def test_one_label(tmp_path: Path, case: str) -> None:
    folder, theirs = saved(tmp_path, case)
    pairs = [(ASKED, text) for text in RANKED]
    expected = theirs.predict(pairs)
    logits = theirs.predict(pairs, activation_fn=torch.nn.Identity())
    with engine.Engine.load(str(folder), device="cpu") as ours:
        np.testing.assert_allclose(ours.score(pairs), expected, atol=2e-5, rtol=0)
        np.testing.assert_allclose(ours.score(pairs, raw=True), logits, atol=1e-4, rtol=0)
        ranked = ours.rerank(ASKED, RANKED)
    theirs_ranked = theirs.rank(ASKED, RANKED)
    assert [each.index for each in ranked] == [each["corpus_id"] for each in theirs_ranked]
    np.testing.assert_allclose([r.score for r in ranked], [float(r["score"]) for r in theirs_ranked], atol=2e-5)


def test_activation_of_the_models_own_and_a_prompt(tmp_path: Path) -> None:
    _, theirs = saved(tmp_path, "bert")
    theirs.activation_fn = torch.nn.Identity()
    theirs.prompts, theirs.default_prompt_name = {"q": "find : "}, "q"
    theirs.save_pretrained(str(tmp_path / "again"))
    pairs = [(ASKED, text) for text in RANKED]
    with engine.Engine.load(str(tmp_path / "again"), device="cpu") as ours:
        np.testing.assert_allclose(ours.score(pairs), theirs.predict(pairs), atol=1e-4, rtol=0)
        assert [r.index for r in ours.rerank(ASKED, RANKED)] == [r["corpus_id"] for r in theirs.rank(ASKED, RANKED)]
