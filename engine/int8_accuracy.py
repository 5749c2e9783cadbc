"""Measures what int8 changes in a model's rows, compared with the default dtype.

Accuracy is measured at load, on sentences.txt: plain English, eight sentences on each of 26 subjects.
"""

from __future__ import annotations

import math
from importlib.resources import files

import numpy as np
import numpy.typing as npt

from embert.engine.batch import TaskOutput
from embert.engine.decisions import Question, second_texts
from embert.engine.encode_batches import encode_batches
from embert.engine.encoders.base import Encoder
from embert.engine.errors import UnsupportedModel
from embert.engine.heads.scores import scores
from embert.engine.model import Model
from embert.engine.models.encoder_config import EncoderConfig, tensor_shapes
from embert.engine.quantization.accuracy import Int8Accuracy, accuracy_of_labels, accuracy_of_rows
from embert.engine.tasks import ALL_TASKS, Task
from embert.engine.tokenization.encoded import Encoded, TokenizeOptions
from embert.engine.tokenization.tokenizer import Tokenizer


def check_accuracy(accuracy: Int8Accuracy, model: Model, least: float) -> None:
    """Raise UnsupportedModel if the worst text's accuracy is below `least`."""
    if accuracy.worst >= least:
        return
    # NaN fails the comparison, too.
    raise UnsupportedModel(
        f"{model.model_id} in int8 agrees too little with {accuracy.dtype}: its worst {accuracy.measure} over "
        f"{accuracy.texts} sentences is {accuracy.worst:.4f}, at least {least:g} is asked for; "
        "use another --dtype, or lower --min-agreement"
    )


Floats = npt.NDArray[np.float32]


def _task_of(model: Model) -> Task:
    """Return the task that accuracy is measured on: the model's first."""
    return next(task for task in ALL_TASKS if task in model.tasks)


def encode_sentences(model: Model, *, on_cpu: bool) -> Encoded:
    """Tokenize the sentences. A model of one score reads each of them paired with the next one."""
    tokenizer, texts, classifier = Tokenizer(model), _affordable(model.config, on_cpu=on_cpu), model.heads.classifier
    scores = _task_of(model) == Task.CLASSIFY and classifier is not None and len(classifier.labels) == 1
    others = [*texts[1:], texts[0]]
    if _task_of(model) == Task.DECIDE:
        others = second_texts(model, [Question.predicate(text) for text in others])
    if scores or _task_of(model) == Task.DECIDE:
        return tokenizer.encode_pairs(texts, others)
    return tokenizer.encode(texts, TokenizeOptions(is_query=False if _task_of(model) == Task.MULTI else None))


def compare(model: Model, encoded: Encoded, int8: Encoder, reference: Encoder) -> Int8Accuracy:
    """Measure the accuracy of `int8` against `reference`. Raises EncoderError if a forward fails."""
    task = _task_of(model)
    own_rows, reference_rows = (_rows(encoder, encoded, task, model.max_input_length) for encoder in (int8, reference))
    classifier = model.heads.classifier
    if task == Task.DECIDE:  # of statements, which have two options
        own, other = (rows.values[:, :1] - rows.values[:, 1:2] for rows in (own_rows, reference_rows))
        probabilities = scores(own, "sigmoid"), scores(other, "sigmoid")
        return accuracy_of_labels(own, other, probabilities, dtype=reference.dtype)
    if task == Task.TOKEN_CLASSES or (task == Task.CLASSIFY and classifier is not None):
        activation = "softmax" if classifier is None else classifier.activation
        class_scores = scores(own_rows.values, activation), scores(reference_rows.values, activation)
        return accuracy_of_labels(own_rows.values, reference_rows.values, class_scores, dtype=reference.dtype)
    if task == Task.SPARSE:
        vocabulary = model.config.vocab_size
        return accuracy_of_rows(_dense(own_rows, vocabulary), _dense(reference_rows, vocabulary), dtype=reference.dtype)
    texts = None if task == Task.EMBED else (_means(own_rows), _means(reference_rows))
    return accuracy_of_rows(own_rows.values, reference_rows.values, texts, dtype=reference.dtype)


def _rows(encoder: Encoder, encoded: Encoded, task: Task, longest: int) -> TaskOutput:
    """Return the rows in the order of the sentences."""
    budget = max(encoder.batch_tokens, longest)
    numbers, parts = zip(*encode_batches(encoder, encoded, task, budget=budget), strict=True)
    return TaskOutput.concatenate([part[task] for part in parts]).take(np.argsort(np.concatenate(numbers)))


def _means(rows: TaskOutput) -> Floats:
    """The mean of each text's rows: [n, columns]."""
    return np.stack([part.mean(0) for part in np.split(rows.values, rows.offsets[1:-1])])


def _dense(rows: TaskOutput, columns: int) -> Floats:
    """Sparse vectors with their zeros: [n, columns]."""
    vectors = np.zeros((rows.sequences, columns), np.float32)
    vectors[np.repeat(np.arange(rows.sequences), rows.counts), rows.indices] = rows.values[:, 0]
    return vectors


# Sentences times parameters of the layers: on two cores of an EPYC they take a float32 encoder about a second.
_PARAMETER_SENTENCES = 208 * 11_000_000
_LEAST = 40  # whatever the model's size: each has ten neighbors among them


def sentences() -> list[str]:
    return (files("embert.engine.quantization") / "sentences.txt").read_text("utf-8").splitlines()


def _affordable(config: EncoderConfig, *, on_cpu: bool) -> list[str]:
    """Return all sentences, or on a CPU as many of all subjects as keep the start of a large model short."""
    every = sentences()
    if not on_cpu:
        return every
    shapes = tensor_shapes(config)
    used = [name for name in shapes if name.startswith("encoder.layer.")]
    repeats = config.layers / max(1, len({config.stored_layer(n) for n in range(config.layers)}))
    parameters = repeats * sum(math.prod(shapes[name]) for name in used)
    count = min(len(every), max(_LEAST, int(_PARAMETER_SENTENCES / max(1, parameters))))
    return [every[number * len(every) // count] for number in range(count)]
