"""Tasks: what a request asks of a model. A task's head computes its rows from hidden states (TaskOutput in batch.py).

Requests of different tasks share a batch: the layers run once, and each head runs on the sequences that want it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Task(enum.IntFlag):
    """One task, or several of the same text: their rows come from one forward."""

    EMBED = 1  # a vector a sequence: pooled, through the model's Dense modules, cut, normalized
    TOKENS = 2  # a vector a token: the last hidden state, unchanged
    # The logits of a sequence, one a label; scores and classes are made of them. Of late interaction the score of a
    # document with a query of the same batch (PackedBatch.is_query).
    CLASSIFY = 4
    SPARSE = 8  # (index, value) pairs of a sequence: weights of the vocabulary's tokens, non-zeros only
    MULTI = 16  # a vector a token, projected and of length 1: late interaction
    TOKEN_CLASSES = 32  # the logits of a token, one a label: entities are made of them
    DECIDE = 64  # the logits of the options of a question
    LABEL_MASS = 128  # the logarithm of the sum of the exponentials of a whole vocabulary's logits


ALL_TASKS = tuple(Task)
NO_TASK = Task(0)


@dataclass(frozen=True, slots=True)
class Sharing:
    """The texts of a request that an encoder lets continue the first one (PackedBatch.prefixes)."""

    tasks: int = NO_TASK  # texts with these tasks only
    padding_id: int | None = None  # no text that ends with this token
    step: int = 1  # the tokens in common are a multiple of it
    least_text: int = 0  # no text of fewer tokens
    least_saved: int = 0  # tokens of a request; where they are fewer, none of its texts


NO_SHARING = Sharing()

_NAMES = {
    Task.EMBED: "embed",
    Task.TOKENS: "tokens",
    Task.CLASSIFY: "classify",
    Task.SPARSE: "sparse",
    Task.MULTI: "multi_vector",
    Task.TOKEN_CLASSES: "token_classify",
    Task.DECIDE: "decide",
    Task.LABEL_MASS: "label_mass",
}


def task_names(tasks: Task) -> list[str]:
    """The tasks by the names that people read."""
    return [_NAMES[task] for task in ALL_TASKS if task in tasks]
