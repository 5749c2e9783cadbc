"""DeBERTa v2 and v3: buckets of distances, the newer head, and what GPUs run of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from embert import engine
from embert.engine.encoders.cuda.shapes import refusal
from embert.engine.encoders.positions import relative_rows
from embert.engine.memory_estimate import estimate_memory
from embert.engine.models.encoder_config import Disentangled, position_bytes
from tests.engine.conftest import random_sequences, small_tokenizer
from tests.engine.heads.test_sparse import dense, sparse
from tests.oracles.model_cases import SHORT_CASES, build

CASES = [case for case in SHORT_CASES if case.startswith("deberta")]


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


def test_the_newer_head_of_a_masked_language_model(tmp_path: Path) -> None:
    """Its decoder is always the word table."""
    folder = build(
        tmp_path, "deberta-v2", head="ForMaskedLM", modules=False, legacy=False, tokenizer=small_tokenizer(64)
    )
    model = engine.load_model(str(folder), pooling="splade")
    encoder, (ids,) = engine.load_encoder(model, device="cpu"), random_sequences([40], 64)
    oracle: Any = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = oracle(torch.from_numpy(ids[None].astype(np.int64))).logits[0].relu().log1p().amax(0).numpy()
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(dense(sparse(encoder, [ids]), 0, 64), expected, atol=1e-4)


def test_memory_counts_the_rows_of_distances(tmp_path: Path) -> None:
    """Rows of a layer's queries and keys: 32 rows of 64 columns each, of 4 bytes."""
    folder = build(tmp_path, "deberta-v2", tokenizer=small_tokenizer(64))
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
    folder = build(tmp_path, case, tokenizer=small_tokenizer(64))
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
    folder = build(tmp_path, case, tokenizer=small_tokenizer(64), **config)
    assert named in str(refusal(engine.load_model(str(folder))))
