"""Zero-shot classes: transformers' ZeroShotClassificationPipeline on the logits of pairs, in numpy.

A pair is a text and a hypothesis about it, such as "This example is sports."; a model of natural language inference
says whether the second follows from the first.
"""

from __future__ import annotations

import contextlib
import string
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from embert.engine.errors import InputError
from embert.engine.heads.scores import LabelScore, scores

TEMPLATE = "This example is {}."
MOST_LABELS = 1000
MOST_TEMPLATE_CHARACTERS = 65_536
_SHOWN_CHARACTERS = 40


def check_labels(labels: Sequence[str], param: str) -> None:
    """Raise InputError for no labels, an empty one, or more than MOST_LABELS. `param` is the field that they are in."""
    if not labels:
        raise InputError("must have at least one label", param=param)
    _check_count(len(labels), param)
    if "" in labels:
        raise InputError("must not be empty", param=f"{param}[{[*labels].index('')}]")


def split_labels(text: str, param: str) -> list[str]:
    """Labels with commas between them, without blank ones. Raises InputError for more than MOST_LABELS commas."""
    if (commas := text.count(",")) > MOST_LABELS:
        _check_count(commas + 1, param)
    return [label for each in text.split(",") if (label := each.strip())]


def _check_count(labels: int, param: str) -> None:
    if labels > MOST_LABELS:
        raise InputError(f"has {labels} labels; the limit is {MOST_LABELS}", param=param)


def hypotheses(template: str, labels: Sequence[str], param: str = "hypothesis_template") -> list[str]:
    """The template with each label instead of {}.

    Raises InputError, which names `param`, for a template without {} or with other fields: str.format would let a
    client ask for any width, and for attributes.
    """
    if len(template) > MOST_TEMPLATE_CHARACTERS:
        raise InputError(f"has {len(template)} characters; the limit is {MOST_TEMPLATE_CHARACTERS}", param=param)
    pieces: list[tuple[str, str | None, str | None, str | None]] = []
    with contextlib.suppress(TypeError, ValueError):
        pieces = [*string.Formatter().parse(template)]
    fields = [index for index, piece in enumerate(pieces) if piece[1] is not None]
    if len(fields) != 1 or pieces[fields[0]][1:] != ("", "", None):
        description = repr(template)
        description = description if len(description) <= _SHOWN_CHARACTERS else f"{description[:_SHOWN_CHARACTERS]}…"
        raise InputError(f"must have {{}} once, where the label goes; it is {description}", param=param)
    before, after = ("".join(text for text, *_ in part) for part in (pieces[: fields[0] + 1], pieces[fields[0] + 1 :]))
    return [f"{before}{label}{after}" for label in labels]


def zero_shot_labels(
    logits: npt.NDArray[np.float32], labels: Sequence[str], entailment: int, *, multi_label: bool
) -> list[LabelScore]:
    """Sorts all labels of a text, best first. `logits` are float32 [labels, classes], `entailment` one of the classes.

    The scores add up to 1; with `multi_label`, or one label, each is the probability of entailment against
    contradiction. Of equals the later one comes first, as in the pipeline.
    """
    if multi_label or len(labels) == 1:
        contradiction = -1 if entailment == 0 else 0
        values = scores(logits[:, [contradiction, entailment]], "softmax")[:, 1]
    else:
        values = scores(logits[None, :, entailment], "softmax")[0]
    order = values.argsort(kind="stable")[::-1].tolist()
    return [LabelScore(labels[number], float(values[number])) for number in order]
