"""Decisions of the engine, by models of natural language inference."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from embert import engine
from embert.engine import Decision, Question
from embert.engine.errors import InputError
from tests.oracles.pipelines import NLI, write

STATE = "Angela met Merkel in New York"


@pytest.fixture(scope="module")
def inference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[engine.Engine]:
    folder = write(tmp_path_factory.mktemp("nli"), "uncased", "bert", "ForSequenceClassification", NLI)
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        yield loaded


def test_options_become_hypotheses(inference: engine.Engine) -> None:
    questions = [
        Question.predicate("they met"),
        Question.choice("where?", {"York": "a town", "in": ""}),
        Question.score("how far?", ["near", "far", "farther"]),
    ]
    predicate, choice, score = inference.decide(STATE, questions)
    (alone,) = inference.zero_shot([STATE], ["they met"], hypothesis_template="{}")
    assert predicate.probabilities[0] == pytest.approx(alone[0].score, abs=1e-6)
    (of_labels,) = inference.zero_shot([STATE], ["York: a town", "in"], hypothesis_template="where? {}")
    expected = {label.label: label.score for label in of_labels}
    assert choice.probabilities == pytest.approx([expected["York: a town"], expected["in"]], abs=1e-6)
    assert len(score.probabilities) == 3
    # Alone or with others, the bits are the same.
    assert [inference.decide(STATE, [question])[0] for question in questions] == [predicate, choice, score]


def test_confidence_and_score_follow_from_the_probabilities() -> None:
    decision = Decision((0.5, 0.25, 0.25))
    entropy = 0.5 * math.log(2) + 0.5 * math.log(4)
    assert decision.confidence == pytest.approx(1 - entropy / math.log(3))
    assert (decision.index, decision.score) == (0, 0.75)
    assert Decision((1.0, 0.0)).confidence == 1
    assert Decision((0.5, 0.5)).confidence == 0


@pytest.mark.parametrize(
    ("questions", "named"),
    [
        ([], "1 to 200"),
        ([Question.predicate("a")] * 201, "201"),
        ([Question.choice("a", ["b"])], "2 to 255 choices, found 1"),
        ([Question.choice("a", [*map(str, range(256))])], "found 256"),
        ([Question.score("a", [*map(str, range(11))])], "2 to 10 levels, found 11"),
    ],
)
def test_refused_questions(inference: engine.Engine, questions: list[Question], named: str) -> None:
    with pytest.raises(InputError, match=named):
        inference.decide(STATE, questions)


def test_long_state_is_cut_and_a_long_question_is_not(inference: engine.Engine) -> None:
    (cut,) = inference.decide(f"{STATE} " * 30, [Question.predicate("they met")])
    assert np.isfinite(cut.probabilities).all()
    with pytest.raises(InputError, match="questions"):
        inference.decide(STATE, [Question.predicate("they met " * 60)])


def test_model_that_does_not_decide() -> None:
    with engine.Engine.load(device="cpu") as embedder, pytest.raises(InputError, match="task decide; it has embed"):
        embedder.decide(STATE, [Question.predicate("they met")])
