"""The rows of all sentences, by the task that a model is compared by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from embert.engine.encode_batches import encode_batches
from embert.engine.encoders.base import Encoder
from embert.engine.heads.scores import scores
from embert.engine.model import Model
from embert.engine.quantization.accuracy import Int8Accuracy, accuracy_of_labels, accuracy_of_rows
from embert.engine.task_output import TaskOutput
from embert.engine.tasks import ALL_TASKS, Task
from embert.engine.tokenization.encoded import Encoded
from embert.engine.tokenization.tokenizer import Tokenizer

__all__ = ["compared", "encoded_for", "task_of"]

Floats = npt.NDArray[np.float32]


def task_of(model: Model) -> Task:
    """The task that says how well encoders agree: the first that the model has."""
    return next(task for task in ALL_TASKS if task in model.tasks)


def encoded_for(model: Model, tokenizer: Tokenizer, texts: Sequence[str]) -> Encoded:
    """The sentences as this model reads them: for a model of one score each with the next one, as a pair."""
    classifier = model.heads.classifier
    if task_of(model) == Task.CLASSIFY and classifier is not None and len(classifier.labels) == 1:
        return tokenizer.encode_pairs(texts, [*texts[1:], texts[0]], truncate=True)
    return tokenizer.encode(texts, truncate=True, is_query=False if task_of(model) == Task.MULTI else None)


def compared(model: Model, encoded: Encoded, ours: Encoder, theirs: Encoder) -> Int8Accuracy:
    """How well `ours` agrees with `theirs`. Raises EncoderError if a forward fails."""
    task = task_of(model)
    mine, other = (_rows(encoder, encoded, task, model.max_input_length) for encoder in (ours, theirs))
    if task == Task.CLASSIFY and model.heads.classifier is not None:
        activation = model.heads.classifier.activation
        given = scores(mine.values, activation), scores(other.values, activation)
        return accuracy_of_labels(mine.values, other.values, given, dtype=theirs.dtype)
    if task == Task.SPARSE:
        vocabulary = model.config.vocab_size
        return accuracy_of_rows(_dense(mine, vocabulary), _dense(other, vocabulary), dtype=theirs.dtype)
    texts = None if task == Task.EMBED else (_means(mine), _means(other))
    return accuracy_of_rows(mine.values, other.values, texts, dtype=theirs.dtype)


def _rows(encoder: Encoder, encoded: Encoded, task: Task, longest: int) -> TaskOutput:
    """In the order of the sentences."""
    budget = max(encoder.batch_tokens, longest)
    numbers, parts = zip(*encode_batches(encoder, encoded, task, budget=budget), strict=True)
    return TaskOutput.joined([part[task] for part in parts]).taken(np.argsort(np.concatenate(numbers)))


def _means(rows: TaskOutput) -> Floats:
    """The mean of each text's rows: [n, columns]."""
    return np.stack([part.mean(0) for part in np.split(rows.values, rows.offsets[1:-1])])


def _dense(rows: TaskOutput, columns: int) -> Floats:
    """Sparse vectors with their zeros: [n, columns]."""
    vectors = np.zeros((rows.sequences, columns), np.float32)
    vectors[np.repeat(np.arange(rows.sequences), rows.counts), rows.indices] = rows.values[:, 0]
    return vectors
