"""Reads the classification head of a model: HuggingFace's `…ForSequenceClassification`, `…ForTokenClassification`.

sentence-transformers' CrossEncoder writes such a folder too: config.json and the weights before version 6, modules.json
with only a Transformer since. Its files state how logits become scores.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.files.json_files import architectures_of, read_object, read_optional
from embert.engine.heads.checkpoints.stored import check_layer, stored_tensors
from embert.engine.heads.description import Classifier, Layer, Norm, TokenClassifier
from embert.engine.heads.modules import LogitScore
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.models.tensor_names import Classification, TensorNames

SUFFIX = "ForSequenceClassification"
TOKEN_SUFFIX = "ForTokenClassification"  # noqa: S105  # of a class, not a secret

# sentence-transformers' name of what it applies to logits → ours.
ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
}
MOST_LABELS = 1_000_000
# HuggingFace's `problem_type` → what its own pipelines apply. Where there is none, the number of labels decides.
PROBLEM_TYPES = {
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
    "regression": "identity",
}


def read_classifier(folder: Path, weights: Path, encoder_config: EncoderConfig) -> Classifier | TokenClassifier | None:
    """The head that config.json names; None if it names none. `folder` is the model's, `weights` has config.json.

    Raises BrokenModel or UnsupportedModel, naming the file and the field.
    """
    path = weights / "config.json"
    config, library = read_object(path), folder / "config_sentence_transformers.json"
    library_fields = read_optional(library)
    kind = next(iter(architectures_of(config)), "")
    if kind.endswith(TOKEN_SUFFIX):
        head = _require(encoder_config.tensors.token_classification, path, kind, encoder_config)
        labels = _labels(path, config)
        return TokenClassifier(_layers(head, encoder_config, len(labels)), labels)
    if not kind.endswith(SUFFIX):
        if library_fields.get("model_type") == "CrossEncoder":
            raise UnsupportedModel(
                f"{library}: model_type CrossEncoder is supported where config.json's architectures are "
                f"…{SUFFIX}, found {kind or 'none'}"
            )
        return None
    head = _require(encoder_config.tensors.classification, path, kind, encoder_config)
    labels = _labels(path, config)
    return Classifier(
        layers=_layers(head, encoder_config, len(labels)),
        labels=labels,
        activation=_activation(path, config, library, library_fields, len(labels)),
        pooling=head.pooling,
        padding_id=_padding_id(path, config, head.padding_id) if head.pooling == "last-token" else None,
        entailment=_entailment(config.get("label2id"), labels),
    )


def _require(head: Classification | None, path: Path, kind: str, encoder_config: EncoderConfig) -> Classification:
    if head is None:
        raise UnsupportedModel(f"{path}: architectures {kind} is not supported for {encoder_config.model_type}")
    return head


def _layers(head: Classification, encoder_config: EncoderConfig, labels: int) -> tuple[Layer, ...]:
    width, absent = encoder_config.hidden_size, encoder_config.tensors.is_absent
    out = Layer(head.out, "", width, labels, head.out_bias, "identity")
    if not head.dense:
        return (out,)
    norm = None
    if head.norm:
        norm = Norm(head.norm, encoder_config.layer_norm_eps, not absent(f"{head.norm}.bias"))
    return Layer(head.dense, "", width, width, not absent(f"{head.dense}.bias"), head.activation, norm), out


def logit_classifier(folder: Path, weights: Path, encoder_config: EncoderConfig, logit_score: LogitScore) -> Classifier:
    """The head of a LogitScore module: two columns of the language model's matrix, of which no other is computed.

    Raises BrokenModel or UnsupportedModel.
    """
    path, library = weights / "config.json", folder / "config_sentence_transformers.json"
    config, library_fields = read_object(path), read_optional(library)
    if encoder_config.tensors.language_model is None:
        raise UnsupportedModel(
            f"{folder / 'modules.json'}: LogitScore is not supported for {encoder_config.model_type}"
        )
    for token_id in logit_score:
        if token_id is not None and token_id >= encoder_config.vocab_size:
            raise BrokenModel(
                f"{folder / 'modules.json'}: LogitScore's token id {token_id} is not below vocab_size "
                f"{encoder_config.vocab_size}"
            )
    layer = dataclasses.replace(
        vocabulary_layer(weights, config, encoder_config),
        outputs=1,
        difference=(logit_score.true_id, logit_score.false_id),
    )
    activation = _activation(path, {**config, "problem_type": None}, library, library_fields, 1)
    return Classifier((layer,), ("LABEL_0",), activation, "last-token")


def vocabulary_layer(weights: Path, config: dict[str, Any], encoder_config: EncoderConfig) -> Layer:
    """A causal language model's matrix. `config` are the fields of config.json in the folder `weights`.

    Raises BrokenModel or UnsupportedModel.
    """
    if config.get("final_logit_softcapping") is not None:
        raise UnsupportedModel(
            f"{weights / 'config.json'}: final_logit_softcapping is not supported with logits; supported: null"
        )
    stored, matrix = stored_tensors(weights), str(encoder_config.tensors.language_model)
    if f"{matrix}.weight" not in stored.shapes:
        if not config.get("tie_word_embeddings", encoder_config.tensors.tied):
            raise BrokenModel(f"{stored.path} has no tensor {matrix}.weight")
        matrix = ""  # tied to the word table
    return Layer(matrix, "", encoder_config.hidden_size, encoder_config.vocab_size, False, "identity")


def stored_classifier(
    classifier: Classifier | TokenClassifier, tensors: TensorNames, folder: Path
) -> Classifier | TokenClassifier:
    """The head with its layers' names in the weights of `folder`, the transformer's.

    Raises BrokenModel where they lack a tensor of the head.
    """
    stored = stored_tensors(folder)
    layers = tuple(
        dataclasses.replace(layer, name=stored.find_name(tensors.head_names(layer.name))) for layer in classifier.layers
    )
    for layer in layers:
        check_layer(stored, layer)
    return dataclasses.replace(classifier, layers=layers)


def _padding_id(path: Path, config: dict[str, Any], usual: int | None) -> int | None:
    """HuggingFace takes the row of the last token that is not padding, also where a text itself ends in that token."""
    padding_id = config.get("pad_token_id", usual)
    if padding_id is not None and (isinstance(padding_id, bool) or not isinstance(padding_id, int)):
        raise BrokenModel(f"{path}: pad_token_id must be an int, found {padding_id!r}")
    return padding_id


def _labels(path: Path, config: dict[str, Any]) -> tuple[str, ...]:
    """The labels in the order of their columns."""
    labels = config.get("id2label")
    if labels is None:
        count = config.get("num_labels", 2)  # HuggingFace's default
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_LABELS:
            raise BrokenModel(f"{path}: num_labels must be an int from 1 to {MOST_LABELS}, found {count!r}")
        return tuple(f"LABEL_{index}" for index in range(count))
    if not isinstance(labels, dict) or set(labels) != {str(index) for index in range(len(labels))} or not labels:
        raise BrokenModel(f"{path}: id2label must map the numbers from 0 on to labels, found {labels!r}")
    return tuple(str(labels[str(index)]) for index in range(len(labels)))


def _entailment(label2id: object, labels: tuple[str, ...]) -> int | None:
    """The label of entailment, as transformers' ZeroShotClassificationPipeline finds it: the first that begins so.

    A model of one label has no zero-shot classes.
    """
    numbers = label2id if isinstance(label2id, dict) else {label: number for number, label in enumerate(labels)}
    found = (number for label, number in numbers.items() if label.lower().startswith("entail"))
    number = next(found, None)
    return number if type(number) is int and 0 <= number < len(labels) and len(labels) > 1 else None


def _activation(path: Path, config: dict[str, Any], library: Path, library_fields: dict[str, Any], labels: int) -> str:
    """The function from logits to scores: as sentence-transformers' files state, or by HuggingFace's `problem_type`."""
    inner = config.get("sentence_transformers")
    settings = [
        (library, "activation_fn", library_fields.get("activation_fn")),  # version 6
        (path, "activation_fn", inner.get("activation_fn") if isinstance(inner, dict) else None),  # 4 and 5
        (path, "sbert_ce_default_activation_function", config.get("sbert_ce_default_activation_function")),
    ]
    for file, field, value in settings:
        if value is None:
            continue
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise UnsupportedModel(f"{file}: {field} {value!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
        activation = ACTIVATIONS[value]
        if activation == "softmax" and labels == 1:
            raise UnsupportedModel(f"{file}: {field} {value} of one label is always 1; supported: Sigmoid, Identity")
        # For several labels it writes Identity as the default, which says nothing about classes.
        if activation != "identity" or labels == 1:
            return activation
        break
    problem = config.get("problem_type")
    if problem is not None and (not isinstance(problem, str) or problem not in PROBLEM_TYPES):
        raise UnsupportedModel(
            f"{path}: problem_type {problem!r} is not supported; supported: {', '.join(PROBLEM_TYPES)}"
        )
    if problem == "regression" or (problem is not None and labels > 1):
        return PROBLEM_TYPES[problem]
    return "sigmoid" if labels == 1 else "softmax"
