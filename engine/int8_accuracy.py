"""Loads an encoder; measures what int8 changes in a model's rows, against the default dtype.

Accuracy is measured at load, on sentences.txt: plain English, eight sentences on each of 26 subjects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.resources import files

import numpy as np
import numpy.typing as npt

from embert.engine.batch import TaskOutput
from embert.engine.encode_batches import encode_batches
from embert.engine.encoders.base import Encoder
from embert.engine.encoders.loader import create_encoder
from embert.engine.errors import UnsupportedModel
from embert.engine.heads.scores import scores
from embert.engine.model import Model
from embert.engine.models.encoder_config import EncoderConfig, tensor_shapes
from embert.engine.quantization import MIN_ACCURACY
from embert.engine.quantization.accuracy import Int8Accuracy, accuracy_of_labels, accuracy_of_rows
from embert.engine.tasks import ALL_TASKS, Task
from embert.engine.tokenization.encoded import Encoded, TokenizeOptions
from embert.engine.tokenization.tokenizer import Tokenizer

__all__ = ["affordable", "compared", "encoded_for", "load_encoder", "sentences", "task_of"]

REFERENCE_TOKENS = 2048  # of a batch of the encoder compared with; no text of the corpus is longer


def load_encoder(
    model: Model,
    *,
    device: str = "auto",
    dtype: str = "auto",
    max_batch_tokens: int | None = None,
    encoder: str = "auto",
    min_agreement: float = MIN_ACCURACY,
) -> Encoder:
    """Load a model's weights into an encoder that is ready to run.

    `device` is "auto" (a CUDA device if this build and this machine have one), "cpu", "cuda" or "cuda:N".
    `dtype` is "auto" (float16 on CUDA, float32 on a CPU), "float32", "float16", "bfloat16" or "int8".
    `max_batch_tokens` is the largest batch, in tokens, that the encoder takes; None is the encoder's own choice.
    `encoder` is "auto", "cuda", "cuda-portable" (CUDA without Hopper's own kernels, as other GPUs run it, for
    comparison), "torch" (the CPU), "torch-portable" (the CPU without our own kernels, as those without AVX-512 run
    it), or "package.module:factory", called as `load_encoder` is, without `encoder`.

    The encoder's `choice` says in one sentence why it was chosen. Raises UnsupportedModel for a device or dtype that
    is not available, for a model that the encoder cannot run and for a CPU without torch, BrokenModel for weights that
    cannot be read.

    With `dtype` "int8" the encoder is compared with the same model in the device's default dtype, and its
    `int8_accuracy` and `choice` state the result. Both encoders are in memory during the comparison. Raises
    UnsupportedModel where the worst text's accuracy is below `min_agreement`, which is 0 to 1.
    """
    if not 0 <= min_agreement <= 1:
        raise UnsupportedModel(f"min_agreement must be 0 to 1, found {min_agreement}")
    built = create_encoder(model, device=device, dtype=dtype, max_batch_tokens=max_batch_tokens, encoder=encoder)
    if dtype != "int8":
        return built
    try:
        built.int8_accuracy = _measured(model, built, encoder)
        _check(built.int8_accuracy, model, min_agreement)
    except BaseException:
        built.close()
        raise
    built.choice = "; ".join(filter(None, (built.choice, str(built.int8_accuracy))))
    return built


def _check(accuracy: Int8Accuracy, model: Model, least: float) -> None:
    if accuracy.worst >= least:
        return
    # NaN fails the comparison, too.
    raise UnsupportedModel(
        f"{model.model_id} in int8 agrees too little with {accuracy.dtype}: its worst {accuracy.measure} over "
        f"{accuracy.texts} sentences is {accuracy.worst:.4f}, at least {least:g} is asked for; "
        "use another --dtype, or lower --min-agreement"
    )


def _measured(model: Model, int8: Encoder, encoder: str) -> Int8Accuracy:
    texts = affordable(model.config, on_cpu=int8.device == "cpu")
    encoded = encoded_for(model, Tokenizer(model), texts)
    tokens = max(REFERENCE_TOKENS, int(encoded.lengths.max()))
    # If int8 runs on the CPU, because CUDA is not available, the reference does too.
    named = "torch" if int8.name == "torch" else encoder
    reference = create_encoder(model, device=int8.device, max_batch_tokens=tokens, encoder=named, prepared=False)
    try:
        return compared(model, encoded, int8, reference)
    finally:
        reference.close()


Floats = npt.NDArray[np.float32]


def task_of(model: Model) -> Task:
    """The task that accuracy is measured on: the model's first."""
    return next(task for task in ALL_TASKS if task in model.tasks)


def encoded_for(model: Model, tokenizer: Tokenizer, texts: Sequence[str]) -> Encoded:
    """The sentences as this model reads them: for a model of one score each with the next one, as a pair."""
    classifier = model.heads.classifier
    if task_of(model) == Task.CLASSIFY and classifier is not None and len(classifier.labels) == 1:
        return tokenizer.encode_pairs(texts, [*texts[1:], texts[0]])
    return tokenizer.encode(texts, TokenizeOptions(is_query=False if task_of(model) == Task.MULTI else None))


def compared(model: Model, encoded: Encoded, int8: Encoder, reference: Encoder) -> Int8Accuracy:
    """The accuracy of `int8` against `reference`. Raises EncoderError if a forward fails."""
    task = task_of(model)
    own_rows, reference_rows = (_rows(encoder, encoded, task, model.max_input_length) for encoder in (int8, reference))
    classifier = model.heads.classifier
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


# Sentences times parameters of the layers: on two cores of an EPYC they take a float32 encoder about a second.
_PARAMETER_SENTENCES = 208 * 11_000_000
_LEAST = 40  # whatever the model's size: each has ten neighbors among them


def sentences() -> list[str]:
    """All of them."""
    return (files("embert.engine.quantization") / "sentences.txt").read_text("utf-8").splitlines()


def affordable(config: EncoderConfig, *, on_cpu: bool) -> list[str]:
    """Those to compare a model on: all, or on a CPU as many as keep a large model's start short, from all subjects."""
    every = sentences()
    if not on_cpu:
        return every
    shapes = tensor_shapes(config)
    used = [name for name in shapes if name.startswith("encoder.layer.")]
    repeats = config.layers / max(1, len({config.stored_layer(n) for n in range(config.layers)}))
    parameters = repeats * sum(math.prod(shapes[name]) for name in used)
    count = min(len(every), max(_LEAST, int(_PARAMETER_SENTENCES / max(1, parameters))))
    return [every[number * len(every) // count] for number in range(count)]
