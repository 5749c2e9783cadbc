"""Entities and zero-shot classes compared with transformers' pipelines, and what Engine refuses."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from embert import engine
from embert.engine.entities import STRATEGIES
from embert.engine.errors import InputError
from embert.engine.tasks import Task
from embert.engine.tokenization.tokenizer import Tokenizer
from tests.engine.conftest import random_sequences, small_tokenizer
from tests.oracles.model_cases import HEAD_CASES, build
from tests.oracles.pipelines import LABELS, NLI, random_texts, write


def entities_like(found: list[engine.Entity], strategy: str) -> list[dict[str, Any]]:
    kind = "entity" if strategy == "none" else "entity_group"
    return [
        {kind: entity.label, "word": entity.word, "start": entity.start, "end": entity.end}
        | ({"index": entity.index} if strategy == "none" else {})
        for entity in found
    ]


def compare_entities(folder: Path, texts: Sequence[str], strides: Sequence[int | None] = (None, 0, 7)) -> int:
    """Raise AssertionError where an entity is not the pipeline's. Returns the number of entities."""
    pipeline: Any = transformers.pipeline("token-classification", str(folder), device="cpu")
    compared = 0
    outputs = {}
    for stride in strides:  # the pipeline's own steps, because one forward serves all strategies
        parameters, *_ = pipeline._sanitize_parameters(stride=stride)
        outputs[stride] = [[*map(pipeline.forward, pipeline.preprocess(text, **parameters))] for text in texts]
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        for strategy in STRATEGIES:
            for stride in strides:
                for ignored in (["O"], ["O", "PER", "B-LOC"], []):
                    if strategy == "none" and stride is not None:
                        continue
                    if ignored != ["O"] and stride == 0:
                        continue
                    found = loaded.entities(texts, aggregation_strategy=strategy, stride=stride, ignore_labels=ignored)
                    *_, parameters = pipeline._sanitize_parameters(aggregation_strategy=strategy, ignore_labels=ignored)
                    for text, entities, forwards in zip(texts, found, outputs[stride], strict=True):
                        expected = pipeline.postprocess(forwards, **parameters)
                        scores = [entity.pop("score") for entity in expected]
                        assert entities_like(entities, strategy) == expected, (strategy, stride, ignored, text)
                        np.testing.assert_allclose([entity.score for entity in entities], scores, atol=1e-4)
                        compared += len(entities)
    return compared


@functools.cache
def texts() -> list[str]:
    return random_texts(16)


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize(
    ("tokenizer", "case", "truncation_side"),
    [("uncased", "bert", "right"), ("cased", "bert", "right"), ("byte level", "roberta", "right"),
     ("unigram", "modernbert", "right"), ("cased", "bert", "left")],
)  # fmt: skip
def test_entities_are_those_of_the_pipeline(tmp_path: Path, tokenizer: str, case: str, truncation_side: str) -> None:
    write(tmp_path, tokenizer, case, "ForTokenClassification", LABELS, truncation_side=truncation_side)
    if truncation_side == "left":
        assert compare_entities(tmp_path, texts()[:8], (None, 7)) > 60
    else:  # texts of all kinds, twice or once
        assert compare_entities(tmp_path, texts()[: 16 if tokenizer == "cased" else 8]) > 250


@pytest.mark.parametrize("case", [case for case in HEAD_CASES if not case.startswith("gemma")])
def test_logits_of_tokens_equal_hugging_face(tmp_path: Path, case: str) -> None:
    names: dict[str, Any] = {
        "id2label": dict(enumerate(LABELS)),
        "label2id": {label: i for i, label in enumerate(LABELS)},
    }
    build(tmp_path, case, vocab_size=99, head="ForTokenClassification", modules=False, **names)
    small_tokenizer(99).save(str(tmp_path / "tokenizer.json"))
    model = engine.load_model(str(tmp_path))
    assert model.tasks == Task.TOKEN_CLASSES
    assert not [notice for notice in model.notices if "nothing uses" in notice]
    sequences = random_sequences([1, 2, 17, 33, 5, 64], 90)
    made: Any = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        inputs = [torch.from_numpy(ids[None].astype(np.int64)) for ids in sequences]
        expected = np.concatenate([made(input_ids=ids).logits[0].numpy() for ids in inputs])
    assert np.ptp(expected) > 0.1
    encoder = engine.load_encoder(model, device="cpu")
    found = encoder.encode(engine.pack(sequences), Task.TOKEN_CLASSES)
    encoder.close()
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[engine.Engine]:
    folder = write(tmp_path_factory.mktemp("tagger"), "cased", "bert", "ForTokenClassification", LABELS)
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def inference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[engine.Engine]:
    folder = write(tmp_path_factory.mktemp("nli"), "uncased", "bert", "ForSequenceClassification", NLI)
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        yield loaded


def test_zero_shot_classes_are_those_of_the_pipeline(inference: engine.Engine) -> None:
    pipeline: Any = transformers.pipeline("zero-shot-classification", str(inference.model.folder), device="cpu")
    labels = ["politics", "Müller", "東京", "sport and games", "🙂"]
    for wanted in (labels, labels[:1]):
        for multi_label in (False, True):
            for template in ("This example is {}.", "{}", "It is about {{{}}}, and {{nothing}} else at all it is."):
                options: dict[str, Any] = {"hypothesis_template": template, "multi_label": multi_label}
                found = inference.zero_shot(texts()[:8], wanted, **options)
                for text, classes in zip(texts(), found, strict=False):
                    expected = pipeline(text, wanted, **options)
                    assert [each.label for each in classes] == expected["labels"], text
                    np.testing.assert_allclose([each.score for each in classes], expected["scores"], atol=1e-4)


def test_first_label_of_entailment_counts(tmp_path: Path) -> None:
    folder = write(tmp_path, "uncased", "bert", "ForSequenceClassification", ("entailment", "neutral", "no"))
    config = folder / "config.json"
    pipeline: Any = transformers.pipeline("zero-shot-classification", str(folder), device="cpu")
    classifier = engine.load_model(str(folder)).heads.classifier
    assert classifier is not None
    assert classifier.entailment == pipeline.entailment_id == 0
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        (found,) = loaded.zero_shot(["a text"], ["one", "two"], multi_label=True)
    expected = pipeline("a text", ["one", "two"], multi_label=True)
    np.testing.assert_allclose([each.score for each in found], expected["scores"], atol=1e-5)
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "label2id": {"neutral": 1, "Entail": 2, "entailment": 0}}))
    classifier = engine.load_model(str(folder)).heads.classifier
    assert classifier is not None
    assert classifier.entailment == 2


@pytest.mark.parametrize(
    ("options", "param", "named"),
    [
        ({"aggregation_strategy": "most"}, "aggregation_strategy", "'most'"),
        ({"aggregation_strategy": "none", "stride": 2}, "stride", "none"),
        ({"stride": 46}, "stride", "from 0 to 45"),
        ({"stride": -1}, "stride", "found -1"),
        ({"ignore_labels": "O"}, "ignore_labels", "one str"),
        ({"truncate": "false"}, "truncate", "'false'"),
    ],
)
def test_refused_options_of_entities(tagger: engine.Engine, options: dict[str, Any], param: str, named: str) -> None:
    with pytest.raises(InputError, match=named) as refused:
        tagger.entities(["Angela"], **options)
    assert refused.value.param == param


def test_long_text_is_cut_refused_or_read_in_sequences(tagger: engine.Engine) -> None:
    text = "met in New York " * 60
    whole = tagger.entities([text], stride=10, ignore_labels=())[0]
    cut = tagger.entities([text], ignore_labels=())[0]
    assert cut[-1].end < 200 < whole[-1].end
    with pytest.raises(InputError, match="text 1 has more than 48 tokens"):
        tagger.entities(["met", text], truncate=False)
    assert tagger.entities(["", "  "]) == [[], []]


@pytest.mark.parametrize("stride", [1, 7, 45])
def test_tokens_of_all_sequences_are_known_before_they_are_in_memory(tagger: engine.Engine, stride: int) -> None:
    """A server can refuse them: with the largest stride they are 48 times the text's tokens."""
    texts = ["a", "", "a " * 46, "a " * 47, "a " * 99, "a " * 3000]
    chunks, counts = tagger.tokenizer.encode_spans_chunks(texts, stride=stride), []
    while True:
        try:
            counts.append(next(chunks))
        except StopIteration as last:
            spans = last.value
            break
    assert max(counts) == counts[-1] == spans.encoded.tokens
    assert spans.encoded.tokens == spans.encoded.lengths.sum() > sum(map(len, texts)) // 2


@pytest.mark.parametrize("truncation_side", ["right", "left"])
def test_offsets_of_sequences_that_begin_with_spaces(tmp_path: Path, truncation_side: str) -> None:
    """Byte-level offsets leave out a token's spaces, but a single one of a sequence's first token."""
    write(tmp_path, "byte level", "roberta", "ForTokenClassification", LABELS, truncation_side=truncation_side)
    text = "".join(" " * (index % 7) + "letters"[: index % 3] for index in range(400))
    tokenizer, pretrained = Tokenizer(engine.load_model(str(tmp_path))), transformers.AutoTokenizer
    library = pretrained.from_pretrained(tmp_path)
    for stride in (0, 1, 7):
        spans = tokenizer.encode_spans([text], stride=stride)
        options = {"stride": stride, "return_overflowing_tokens": True, "return_offsets_mapping": True}
        expected = library(text, truncation=True, **options)
        assert spans.encoded.ids.tolist() == [token_id for ids in expected["input_ids"] for token_id in ids]
        found = np.stack([spans.starts, spans.stops], 1)
        offsets = np.concatenate([[(-1, -1), *each[1:-1], (-1, -1)] for each in expected["offset_mapping"]])
        np.testing.assert_array_equal(found, offsets)


@pytest.mark.parametrize(
    ("labels", "options", "param", "named"),
    [
        ([], {}, "labels", "at least one"),
        (["a"] * 1001, {}, "labels", "1001 labels; the limit is 1000"),
        (["a", ""], {}, "labels[1]", r"labels\[1\]"),
        ("a", {}, "labels", "one str"),
        (["a"], {"hypothesis_template": "no place"}, "hypothesis_template", "'no place'"),
        (["a"], {"hypothesis_template": "{} {}"}, "hypothesis_template", "once"),
        (["a"], {"hypothesis_template": "{:999999999}"}, "hypothesis_template", "999999999"),
        (["a"], {"hypothesis_template": "{0.__class__}"}, "hypothesis_template", "__class__"),
        (["a"], {"hypothesis_template": "{"}, "hypothesis_template", "'{'"),
        (["a"], {"multi_label": "no"}, "multi_label", "'no'"),
        (["long " * 60], {}, "labels", "limit is 47"),
    ],
)
def test_refused_zero_shot_requests(
    inference: engine.Engine, labels: list[str], options: dict[str, Any], param: str, named: str
) -> None:
    with pytest.raises(InputError, match=named) as refused:
        inference.zero_shot(["a text"], labels, **options)
    assert refused.value.param == param


def test_models_without_the_task(tagger: engine.Engine, tmp_path: Path) -> None:
    folder = write(tmp_path, "uncased", "bert", "ForSequenceClassification", ("good", "bad"))
    with engine.Engine.load(str(folder), device="cpu") as classifier:
        with pytest.raises(InputError, match=r"no label of entailment \(.* label2id .*; its labels: good, bad"):
            classifier.zero_shot(["a"], ["b"])
        with pytest.raises(InputError, match="does not have the task token_classify; it has classify"):
            classifier.entities(["a"])
    with pytest.raises(InputError, match="does not have the task classify; it has token_classify"):
        tagger.zero_shot(["a"], ["b"])
