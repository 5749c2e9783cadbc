"""DeBERTa v2 and v3: buckets of distances, lengths to 512 compared with float64, and sentence-transformers' classes."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from embert import engine
from embert.engine.encoders.cuda.shapes import refusal
from embert.engine.encoders.positions import relative_rows
from embert.engine.memory_estimate import estimate_memory
from embert.engine.models.encoder_config import Disentangled, position_bytes
from embert.engine.tasks import Task
from tests.engine.conftest import random_sequences
from tests.oracles.model_cases import SHORT_CASES, build
from tests.oracles.sentences import embeddings, logits

CASES = [case for case in SHORT_CASES if case.startswith("deberta")]
VOCABULARY = 400
TEXTS = [
    "What is the capital of China?",
    "a",
    " two  spaces, and\n\nlines\t",
    "déjà vu, 東京は日本の首都です, 1234567 e\u0301 ",
    "it's [SEP] inside [MASK]",
    "def build(folder: Path) -> Path:\n    return folder\n" * 30,
]


@functools.cache
def tokenizer_json() -> str:
    """DeBERTa v3's, with a small vocabulary, as a converter makes it of SentencePiece's."""
    tokenizer = Backend(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace(" ", " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    trainer = trainers.UnigramTrainer(vocab_size=VOCABULARY - 20, special_tokens=special, unk_token="[UNK]")
    tokenizer.train([__file__], trainer)
    tokenizer.add_special_tokens(["[MASK]"])
    around = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", around
    )
    text: str = tokenizer.to_str()
    return text


def save_tokenizer(folder: Path, **fields: Any) -> None:
    (folder / "tokenizer.json").write_text(tokenizer_json())
    stated = {"tokenizer_class": "DebertaV2Tokenizer", "vocab_type": "spm", "do_lower_case": False, **fields}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))


@pytest.mark.parametrize(
    ("count", "farthest"),
    [(2, 4), (3, 17), (16, 17), (31, 128), (100, 129), (255, 512), (256, 512), (256, 200), (256, 1680), (512, 4096)],
)
def test_rows_of_distances_are_those_of_transformers(count: int, farthest: int) -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    longest = 3000
    distances = torch.arange(longest - 1, -longest, -1)
    buckets = make_log_bucket_position(distances, count, farthest).to(torch.long)
    expected = torch.clamp(buckets + count, 0, 2 * count - 1)
    relative = Disentangled(count, farthest, True, True, True, True)
    np.testing.assert_array_equal(relative_rows(relative, longest), expected.numpy())


def test_embeddings_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    folder = build(tmp_path, "deberta-v2, narrow", vocab_size=VOCABULARY)
    save_tokenizer(folder, model_max_length=100)
    expected = embeddings(folder, TEXTS)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        np.testing.assert_allclose(loaded.embed(TEXTS), expected, atol=2e-5)


@pytest.mark.parametrize(("case", "labels"), [("deberta-v2", 1), ("deberta-v2, c2p", 3)])
def test_scores_of_pairs_are_those_of_cross_encoder(tmp_path: Path, case: str, labels: int) -> None:
    """A reranker and a classifier of pairs; the second has token types."""
    folder = build(
        tmp_path, case, vocab_size=VOCABULARY, head="ForSequenceClassification", modules=False, num_labels=labels
    )
    save_tokenizer(folder, model_max_length=60)
    pairs = [("what is it", "a document"), ("short", "many words " * 30), ("words " * 50, "b"), ("a", "c")]
    expected = logits(folder, pairs)
    assert np.ptp(expected) > 0.1
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        outputs = [{each.label: each.score for each in output} for output in loaded.classify(pairs, raw=True)]
    scores = [[output[f"LABEL_{label}"] for label in range(labels)] for output in outputs]
    np.testing.assert_allclose(scores, expected.reshape(-1, labels), atol=1e-4)


def test_the_newer_head_of_a_masked_language_model(tmp_path: Path) -> None:
    """Its decoder is always the word table."""
    folder = build(tmp_path, "deberta-v2", vocab_size=VOCABULARY, head="ForMaskedLM", modules=False, legacy=False)
    save_tokenizer(folder)
    model = engine.load_model(str(folder), pooling="splade")
    encoder, (ids,) = engine.load_encoder(model, device="cpu"), random_sequences([40], VOCABULARY)
    rows = encoder.wait(encoder.submit(engine.pack([ids]).wanting(Task.SPARSE)))[Task.SPARSE]
    oracle: Any = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = oracle(torch.from_numpy(ids[None].astype(np.int64))).logits[0].relu().log1p().amax(0).numpy()
    assert np.ptp(expected) > 0.1
    assert rows.indices is not None
    np.testing.assert_allclose(rows.values[:, 0], expected[rows.indices], atol=1e-4)
    assert len(rows.values) == np.count_nonzero(expected)


def test_memory_counts_the_rows_of_distances(tmp_path: Path) -> None:
    """Rows of a layer's queries and keys: 32 rows of 64 columns each, of 4 bytes."""
    folder = build(tmp_path, "deberta-v2")
    save_tokenizer(folder)
    model = engine.load_model(str(folder))
    plain = dataclasses.replace(model, config=dataclasses.replace(model.config, disentangled=None))
    whole, others = (estimate_memory(each, device="cpu").weights for each in (model, plain))
    table = 4 * (2 * 16 * 64 + 2 * 64)  # with its norm, in the checkpoint
    positions = position_bytes(model.config) - position_bytes(plain.config)
    assert whole - others == 4 * 2 * 2 * 2 * 16 * 64 + table + positions
    whole, others = (estimate_memory(each, device="cuda").weights for each in (model, plain))
    assert whole - others == (4 * 2 * 2 * 2 * 16 * 64 + table) // 2 + positions


@pytest.mark.parametrize("case", CASES)
def test_gpus_run_it(tmp_path: Path, case: str) -> None:
    folder = build(tmp_path, case)
    save_tokenizer(folder)
    model = engine.load_model(str(folder))
    assert [refusal(model, dtype) for dtype in ("auto", "float16", "bfloat16")] == [None] * 3
    for dtype in ("float32", "int8") if model.config.disentangled is not None else ():
        assert f"disentangled attention, which the CUDA encoder does not run in {dtype}" in str(refusal(model, dtype))


@pytest.mark.parametrize(
    ("case", "config", "named"),
    [
        ("deberta-v2", {"hidden_size": 272, "num_attention_heads": 2}, "heads of 136 columns"),
        ("deberta-v2", {"hidden_size": 72, "num_attention_heads": 6}, "heads of 12 columns"),
        ("deberta-v2, plain", {"hidden_size": 72, "num_attention_heads": 6}, "heads of 12 columns"),
        ("deberta-v2", {"position_buckets": 20_000, "max_relative_positions": 20_000}, "32767 rows of distances"),
        ("deberta-v2, narrow", {"position_biased_input": True}, "positions or token types before their norm"),
        ("deberta-v2, narrow", {"type_vocab_size": 2}, "positions or token types before their norm"),
        (
            "deberta-v2",
            {"head": "ForSequenceClassification", "modules": False, "pooler_hidden_act": "silu"},
            "silu in its classification head",
        ),
    ],
)
def test_models_that_gpus_do_not_run(tmp_path: Path, case: str, config: dict[str, Any], named: str) -> None:
    """The CPU does, on a machine with a GPU too, and the start-up log says why."""
    folder = build(tmp_path, case, **config)
    save_tokenizer(folder)
    assert named in str(refusal(engine.load_model(str(folder))))
