"""Classification heads: what files say of them, and the CPU encoder's logits compared with HuggingFace's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from embert import engine
from embert.engine.errors import BrokenModel, ModelError, UnsupportedModel
from embert.engine.heads.description import NO_HEADS, Classifier
from embert.engine.tasks import Task
from tests.engine.conftest import random_sequences, unit
from tests.engine.heads.classifiers import build_classifier, hugging_face_logits
from tests.oracles.model_cases import HEAD_CASES, write_modules
from tests.server.models import edit_json

LENGTHS = [1, 2, 3, 17, 33, 64, 5, 5, 128]


@pytest.mark.parametrize("case", HEAD_CASES)
def test_logits_equal_hugging_face(tmp_path: Path, case: str) -> None:
    folder = build_classifier(tmp_path, case)
    model = engine.load_model(str(folder))
    assert (model.tasks, model.pooling) == (Task.CLASSIFY, "cls")
    sequences = random_sequences(LENGTHS, 90)
    types = random_sequences(LENGTHS, model.config.type_vocab_size, seed=1)
    encoder = engine.load_encoder(model, device="cpu")
    for token_types in (None, types) if model.config.type_vocab_size > 1 else (None,):
        logits = encoder.encode(engine.pack(sequences, token_types=token_types), Task.CLASSIFY)
        expected = hugging_face_logits(folder, sequences, token_types)
        assert np.ptp(expected) > 0.1
        np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("pooling", "dtype"), [("cls", "float32"), ("mean", "float32"), ("last-token", "float32"), ("mean", "bfloat16")]
)
def test_texts_of_different_tasks_share_a_batch(tmp_path: Path, pooling: str, dtype: str) -> None:
    model = engine.load_model(str(build_classifier(tmp_path)), pooling=pooling)
    assert model.tasks == Task.EMBED | Task.TOKENS | Task.CLASSIFY
    assert model.notices == (f"a classification model, which embeds too because pooling {pooling} was asked for",)
    encoder = engine.load_encoder(model, device="cpu", dtype=dtype)
    sequences = random_sequences([5, 300 % 128, 3, 60, 5, 128] * 4, 90)
    whole = engine.pack(sequences)
    tasks = np.array([1, 4, 5, 4, 2, 7] * 4, np.uint8)
    output = encoder.wait(encoder.submit(engine.pack(sequences, tasks=tasks)))
    logits, vectors, states = (encoder.encode(whole, task) for task in (Task.CLASSIFY, Task.EMBED, Task.TOKENS))
    close: dict[str, Any] = {"atol": 1e-4 if dtype == "float32" else 0.1, "rtol": 0}
    np.testing.assert_allclose(output[Task.CLASSIFY].values, logits[tasks & 4 != 0], **close)
    np.testing.assert_allclose(output[Task.EMBED].values, vectors[tasks & 1 != 0], **close)
    split = np.split(states, whole.cu_seqlens[1:-1])
    expected = np.concatenate([each for each, wants in zip(split, tasks & 2, strict=True) if wants])
    np.testing.assert_allclose(output[Task.TOKENS].values, expected, **close)
    first = {"cls": whole.cu_seqlens[:-1], "last-token": whole.cu_seqlens[1:] - 1}.get(pooling)
    if first is not None:
        np.testing.assert_allclose(vectors, unit(states[first]), **close)


@pytest.mark.parametrize(
    ("case", "name", "shape"),
    [
        ("bert", "bert.pooler.dense.weight", (64, 64)),
        ("bert", "classifier.bias", (3,)),
        ("roberta", "classifier.dense.bias", (64,)),
        ("roberta", "classifier.out_proj.weight", (3, 64)),
        ("distilbert", "pre_classifier.weight", (64, 64)),
        ("distilbert", "classifier.weight", (3, 64)),
        ("mpnet", "classifier.out_proj.bias", (3,)),
        ("modernbert", "head.norm.weight", (64,)),
        ("gte", "classifier.weight", (3, 64)),
    ],
)
def test_head_without_its_weights(tmp_path: Path, case: str, name: str, shape: tuple[int, ...]) -> None:
    path = build_classifier(tmp_path, case) / "model.safetensors"
    tensors = load_file(path)
    assert tuple(tensors[name].shape) == shape
    save_file({each: tensor for each, tensor in tensors.items() if each != name}, path)
    with pytest.raises(BrokenModel) as missing:
        engine.load_model(str(tmp_path))
    assert str(missing.value) == f"{path} has no tensor {name}"
    save_file({**tensors, name: torch.zeros(7, 64)}, path)
    with pytest.raises(BrokenModel) as wrong:
        engine.load_model(str(tmp_path))
    assert str(wrong.value) == f"{path}: {name} has shape [7, 64], config.json implies {list(shape)}"


def test_pickled_weights_are_converted_with_the_head(tmp_path: Path) -> None:
    folder = build_classifier(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"from transformers import AutoModelForSequenceClassification as M; "):
        engine.load_model(str(folder))


def test_pooling_module_makes_an_embedding_model_of_any_checkpoint(tmp_path: Path) -> None:
    folder = build_classifier(tmp_path)
    write_modules(folder)
    model = engine.load_model(str(folder))
    assert (model.tasks, model.heads, model.pooling) == (Task.EMBED | Task.TOKENS, NO_HEADS, "mean")


def classifier_of(folder: Path, **config: Any) -> Classifier:
    edit_json(folder / "config.json", **config)
    head = engine.load_model(str(folder)).heads.classifier
    assert head is not None
    return head


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A model of one label and one of two."""
    return {n: build_classifier(tmp_path_factory.mktemp("built"), labels=n) for n in (1, 2)}


@pytest.fixture
def copied(built: dict[int, Path], tmp_path: Path) -> dict[int, Path]:
    """Folders of links, which edit_json replaces."""
    for labels, folder in built.items():
        (tmp_path / str(labels)).mkdir()
        for path in folder.iterdir():
            (tmp_path / str(labels) / path.name).symlink_to(path)
    return {labels: tmp_path / str(labels) for labels in built}


def test_labels(copied: dict[int, Path]) -> None:
    assert classifier_of(copied[1]).labels == ("label 0",)
    assert classifier_of(copied[2], id2label={"1": "yes", "0": "no"}).labels == ("no", "yes")
    assert classifier_of(copied[2], id2label={"0": 5, "1": "LABEL_1"}).labels == ("5", "LABEL_1")
    assert classifier_of(copied[2], id2label=None).labels == ("LABEL_0", "LABEL_1")  # HuggingFace's default
    assert classifier_of(copied[1], id2label=None, num_labels=1).labels == ("LABEL_0",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id2label": {}}, "id2label must map the numbers from 0 on to labels, found {}"),
        ({"id2label": {"1": "a", "2": "b"}}, "id2label must map the numbers from 0 on to labels, found {'1': "),
        ({"id2label": ["a"]}, "id2label must map the numbers from 0 on to labels, found ['a']"),
        ({"id2label": None, "num_labels": 0}, "num_labels must be an int from 1 to 1000000, found 0"),
        ({"problem_type": "something"}, "problem_type 'something' is not supported; supported: multi_label_class"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            "activation_fn 'torch.nn.modules.activation.Tanh' is not supported; supported: torch.nn.modules.linear.Id",
        ),
        (
            {"sbert_ce_default_activation_function": "somebody.Own"},
            "sbert_ce_default_activation_function 'somebody.Own' is not supported; supported: ",
        ),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Softmax"}},
            "activation_fn torch.nn.modules.activation.Softmax of one label is always 1; supported: Sigmoid, Identity",
        ),
    ],
)
def test_fields_that_are_refused(copied: dict[int, Path], fields: dict[str, Any], message: str) -> None:
    edit_json(copied[1] / "config.json", **fields)
    with pytest.raises(ModelError) as caught:
        engine.load_model(str(copied[1]))
    assert str(caught.value).startswith(f"{copied[1] / 'config.json'}: {message}")


def test_more_labels_than_the_weights_have(copied: dict[int, Path]) -> None:
    edit_json(copied[1] / "config.json", id2label={"0": "a", "1": "b"})
    with pytest.raises(BrokenModel, match=r"classifier\.weight has shape \[1, 64\], config\.json implies \[2, 64\]$"):
        engine.load_model(str(copied[1]))


IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
SOFTMAX = "torch.nn.modules.activation.Softmax"


@pytest.mark.parametrize(
    ("labels", "fields", "activation"),
    [
        (1, {}, "sigmoid"),
        (2, {}, "softmax"),
        (1, {"problem_type": "regression"}, "identity"),
        (2, {"problem_type": "regression"}, "identity"),
        (2, {"problem_type": "multi_label_classification"}, "sigmoid"),
        (1, {"problem_type": "multi_label_classification"}, "sigmoid"),
        (2, {"problem_type": "single_label_classification"}, "softmax"),
        (1, {"sbert_ce_default_activation_function": IDENTITY}, "identity"),
        (1, {"sbert_ce_default_activation_function": SIGMOID, "problem_type": "regression"}, "sigmoid"),
        (1, {"sentence_transformers": {"activation_fn": IDENTITY, "version": "5.0.0"}}, "identity"),
        (2, {"sentence_transformers": {"activation_fn": SIGMOID}}, "sigmoid"),
        (2, {"sentence_transformers": {"activation_fn": SOFTMAX}}, "softmax"),
        # What sentence-transformers writes where nobody has chosen anything.
        (2, {"sentence_transformers": {"activation_fn": IDENTITY}}, "softmax"),
        (2, {"sentence_transformers": {"activation_fn": IDENTITY}, "problem_type": "regression"}, "identity"),
    ],
)
def test_activations(copied: dict[int, Path], labels: int, fields: dict[str, Any], activation: str) -> None:
    assert classifier_of(copied[labels], **fields).activation == activation


def test_files_of_sentence_transformers_6(copied: dict[int, Path]) -> None:
    folder = copied[1]
    transformer = {
        "idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer",
    }  # fmt: skip
    (folder / "modules.json").write_text(json.dumps([transformer]))
    edit_json(folder / "sentence_bert_config.json", transformer_task="sequence-classification")
    edit_json(folder / "tokenizer_config.json", model_max_length=50)
    edit_json(folder / "config.json", sentence_transformers={"activation_fn": SIGMOID})
    edit_json(
        folder / "config_sentence_transformers.json", model_type="CrossEncoder", activation_fn=IDENTITY, prompts={}
    )
    model = engine.load_model(str(folder))
    assert model.heads.classifier is not None
    assert (model.heads.classifier.activation, model.tasks, model.max_input_length) == ("identity", Task.CLASSIFY, 50)
    edit_json(folder / "config.json", architectures=["BertModel"])
    with pytest.raises(UnsupportedModel) as caught:
        engine.load_model(str(folder))
    assert str(caught.value) == (
        f"{folder / 'config_sentence_transformers.json'}: model_type CrossEncoder is supported where config.json's "
        "architectures are …ForSequenceClassification, found BertModel"
    )
