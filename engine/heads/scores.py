"""Logits to scores, in numpy: sigmoid, softmax or identity; and ranking.

No logit overflows, and none that is finite gives NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

LARGEST_EXPONENT = 700.0  # float64 holds exp of up to 709; 1 / exp(700) is 0 in float32


@dataclass(frozen=True, slots=True)
class Ranked:
    """A text's index in the request, and its score."""

    index: int
    score: float


@dataclass(frozen=True, slots=True)
class LabelScore:
    """A label, and a text's score for it."""

    label: str
    score: float


def scores(logits: Floats, activation: str) -> Floats:
    """float32 [n, labels] → float32 of the same shape, by a Classifier's `activation`: identity, sigmoid or softmax.

    A larger logit never gets a smaller score: the work is done in float64 and rounded at the end. Logits far from 0 may
    get equal scores, so rank by logits.
    """
    if activation == "identity":
        return logits
    x = logits.astype(np.float64)
    if activation == "sigmoid":
        y = 1 / (1 + np.exp(np.minimum(-x, LARGEST_EXPONENT)))
    else:
        y = np.exp(x - x.max(-1, keepdims=True))
        y /= y.sum(-1, keepdims=True)
    return y.astype(np.float32)


def rank(logits: Floats, activation: str, top_n: int | None = None) -> list[Ranked]:
    """The texts of logits [n], best first; equals in the order given. `top_n` keeps the best."""
    values = scores(logits[:, None], activation)[:, 0]
    order = np.argsort(-logits, kind="stable")[:top_n]
    return [Ranked(index, value) for index, value in zip(order.tolist(), values[order].tolist(), strict=True)]


def best_labels(logits: Floats, activation: str, labels: Sequence[str]) -> list[list[LabelScore]]:
    """Sorts all labels for each text of logits [n, labels], best first; equals in the order of `labels`."""
    order = np.argsort(-logits, axis=1, kind="stable")
    values = np.take_along_axis(scores(logits, activation), order, axis=1)
    return [
        [LabelScore(labels[column], value) for column, value in zip(columns, row, strict=True)]
        for columns, row in zip(order.tolist(), values.tolist(), strict=True)
    ]
