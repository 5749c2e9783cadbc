"""Typed decisions: questions about a state, and a probability for each of their options. No text is generated.

The state and a question become a pair of texts, or one pair for each option; the model's logits of them become the
probabilities. Protocols translate their requests into `Question`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from embert.engine.errors import InputError
from embert.engine.heads.description import LabelDecider
from embert.engine.model import Model
from embert.engine.tasks import Task

Kind = Literal["predicate", "choice", "score"]
Floats = npt.NDArray[np.float32]

MOST_QUESTIONS = 200
MOST_OPTIONS: dict[Kind, int] = {"predicate": 2, "choice": 255, "score": 10}
NAMES: dict[Kind, str] = {"predicate": "options", "choice": "choices", "score": "levels"}  # of options, in errors


@dataclass(frozen=True, slots=True)
class Option:
    """Option of a question."""

    text: str
    description: str = ""

    def __str__(self) -> str:
        return f"{self.text}: {self.description}" if self.description else self.text


@dataclass(frozen=True, slots=True)
class Question:
    """A question about the state. The options of a predicate are yes and no, those of a score its levels, in order."""

    kind: Kind
    instructions: str
    options: tuple[Option, ...]
    param: str = "questions"  # the field with the options, for errors

    @classmethod
    def predicate(cls, instructions: str, *, yes: str = "", no: str = "", param: str = "questions") -> Question:
        """A statement or a yes/no question. `yes` and `no` describe both cases."""
        return cls("predicate", instructions, (Option("yes", yes), Option("no", no)), param)

    @classmethod
    def choice(
        cls, instructions: str, choices: Sequence[str] | Mapping[str, str], *, param: str = "questions"
    ) -> Question:
        """A question with several choices, which may have descriptions."""
        pairs = choices.items() if isinstance(choices, Mapping) else ((text, "") for text in choices)
        return cls("choice", instructions, tuple(Option(*each) for each in pairs), param)

    @classmethod
    def score(cls, instructions: str, levels: Sequence[str], *, param: str = "questions") -> Question:
        """A position on a scale of levels, the lowest one first."""
        return cls("score", instructions, tuple(map(Option, levels)), param)


@dataclass(frozen=True, slots=True)
class Decision:
    """The probabilities of a question's options, which add up to 1."""

    probabilities: tuple[float, ...]
    label_mass: float | None = None  # share of the options in the probability of all tokens, where that was read

    @property
    def index(self) -> int:
        """The most likely option, the first one of equals."""
        return self.probabilities.index(max(self.probabilities))

    @property
    def score(self) -> float:
        """The mean of the options' indices, weighted by their probabilities."""
        return math.fsum(index * probability for index, probability in enumerate(self.probabilities))

    @property
    def confidence(self) -> float:
        """Concentration of the probabilities: 1 less their entropy over its maximum."""
        entropy = -math.fsum(each * math.log(each) for each in self.probabilities if each > 0)
        return min(max(1 - entropy / math.log(len(self.probabilities)), 0.0), 1.0)


def decision_tasks(model: Model, *, label_mass: bool = False) -> Task:
    """The tasks of the pairs. Raises InputError for `label_mass` of other models than language models."""
    if label_mass and not isinstance(model.heads.decider, LabelDecider):
        raise InputError("is for language models, and this model is not one", param="label_mass")
    task = Task.DECIDE if model.heads.decider else Task.CLASSIFY
    return task | Task.LABEL_MASS if label_mass else task


def check_count(count: int, param: str = "questions") -> None:
    """Raise InputError for too many or too few questions."""
    if not 1 <= count <= MOST_QUESTIONS:
        raise InputError(f"must have 1 to {MOST_QUESTIONS} questions, found {count}", param=param)


def check_questions(model: Model, questions: Sequence[Question], param: str = "questions") -> None:
    """Raise InputError for too many or too few questions or options."""
    check_count(len(questions), param)
    decider = model.heads.decider
    labels = len(decider.classifier.labels) if isinstance(decider, LabelDecider) else MOST_OPTIONS["choice"]
    for question in questions:
        count, most = len(question.options), min(MOST_OPTIONS[question.kind], labels)
        if not 2 <= count <= most:
            raise InputError(f"must have 2 to {most} {NAMES[question.kind]}, found {count}", param=question.param)


def pair_count(model: Model, questions: Sequence[Question]) -> int:
    return sum(_pairs_of(model, question) for question in questions)


def pair_characters(model: Model, questions: Sequence[Question]) -> int:
    """The characters of all second texts, without those of the options: instructions are in each pair of a question."""
    return sum(_pairs_of(model, question) * len(question.instructions) for question in questions)


def _pairs_of(model: Model, question: Question) -> int:
    return 1 if model.heads.decider or question.kind == "predicate" else len(question.options)


def second_texts(model: Model, questions: Sequence[Question]) -> list[str]:
    """The second texts of the pairs, whose first text is the state.

    A language model reads the question and its options, each with a label; Laya reads each behind a marker. A model of
    natural language inference reads a hypothesis for each option: the instructions, then the option. That of a
    predicate is its statement alone, with the description of yes.
    """
    decider = model.heads.decider
    if isinstance(decider, LabelDecider):
        return [_label_options(question, decider.classifier.labels) for question in questions]
    if decider is not None:
        return [_mark_options(question, decider.marker_text) for question in questions]
    texts = []
    for question in questions:
        if question.kind == "predicate":
            yes = question.options[0].description
            texts.append(f"{question.instructions} {yes}" if yes else question.instructions)
        else:
            texts += [f"{question.instructions} {option}" for option in question.options]
    return texts


def _label_options(question: Question, labels: Sequence[str]) -> str:
    lines = [f"{label}. {option}" for label, option in zip(labels, question.options, strict=False)]
    return "\n".join((question.instructions, "", *lines, "", "Answer with the label of one option only."))


def _mark_options(question: Question, marker: str) -> str:
    """Writes a question in Laya's words, which have no before yes."""
    kind = _MARKED_KINDS[question.kind]
    options = [str(option) for option in question.options]
    if question.kind == "score":
        options = [f"level {number}: {option}" for number, option in enumerate(options)]
    elif question.kind == "predicate":
        yes, no = (option.description for option in question.options)
        options = [f"false: {no or 'no, the statement does not hold'}", f"true: {yes or 'yes, the statement holds'}"]
    texts = (f"{kind} question: {question.instructions}", *(f" {option}" for option in options))
    return marker.join(text.replace(marker, " ") for text in texts)


_MARKED_KINDS: dict[Kind, str] = {"choice": "choice", "score": "score", "predicate": "noul"}


def read_decisions(
    model: Model, questions: Sequence[Question], logits: Floats, masses: Floats | None = None
) -> list[Decision]:
    """The decisions from the logits of all pairs: float32 [pairs, labels]. `masses` [pairs, 1] are LABEL_MASS.

    To a model of natural language inference a predicate is entailment against contradiction; other options are compared
    by their logits of entailment.
    """
    decisions, start = [], 0
    for question in questions:
        count = _pairs_of(model, question)
        of_options = _logits_of_options(model, question, logits[start : start + count])
        mass = None
        if masses is not None:
            mass = min(math.exp(_log_sum(of_options) - float(masses[start, 0])), 1.0)
        decisions.append(Decision(_softmax(of_options), mass))
        start += count
    return decisions


def _logits_of_options(model: Model, question: Question, rows: Floats) -> Floats:
    """float32 [options], from the rows of a question's pairs."""
    decider, count = model.heads.decider, len(question.options)
    if isinstance(decider, LabelDecider):
        return rows[0, :count]
    if decider is not None:
        logits = rows[0, 1::-1] if question.kind == "predicate" else rows[0, :count]
        return logits / np.float32(decider.temperature(_MARKED_KINDS[question.kind], count))
    classifier = model.heads.classifier
    assert classifier is not None  # noqa: S101 - callers check that the model decides
    assert classifier.entailment is not None  # noqa: S101
    yes, no = classifier.entailment, -1 if classifier.entailment == 0 else 0
    return rows[0, [yes, no]] if question.kind == "predicate" else rows[:, yes]


def _log_sum(logits: Floats) -> float:
    """The logarithm of the sum of exponentials."""
    largest = float(logits.max())
    return largest + math.log(math.fsum(np.exp(logits.astype(np.float64) - largest).tolist()))


def _softmax(logits: Floats) -> tuple[float, ...]:
    values: list[float] = logits.tolist()
    largest = max(values)
    weights = [math.exp(value - largest) for value in values]
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)
