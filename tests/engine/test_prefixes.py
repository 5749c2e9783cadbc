"""Texts that continue another one of their batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embert import engine
from embert.engine.encode_batches import encode_batches, spans
from embert.engine.encoders.cpu.encoder import CpuEncoder
from embert.engine.errors import EncoderError
from embert.engine.prefixes import common_prefix, continue_first
from embert.engine.tasks import NO_SHARING, NO_TASK, Sharing, Task
from embert.engine.tokenization.encoded import Encoded
from tests.engine.conftest import Floats, random_sequences, small_tokenizer
from tests.engine.test_decisions import QUESTIONS, QWEN_TEMPLATE, STATE, language_model
from tests.engine.test_decoders import qwen
from tests.oracles.model_cases import build

WIDE: dict[str, Any] = {
    "intermediate_size": 256, "max_position_embeddings": 512, "hidden_size": 128, "num_attention_heads": 4,
}  # fmt: skip
CASES = ["qwen3", "qwen2, windows", "mistral", "gemma3_text, causal", "ministral3, scaled queries", "llama, yarn"]


def encoder_of(folder: Path, case: str, dtype: str = "float32", **config: Any) -> CpuEncoder:
    build(folder, case, **WIDE, **config, tokenizer=small_tokenizer(64))
    return CpuEncoder(engine.load_model(str(folder), pooling="last-token"), dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_a_shared_prefix(case: str, dtype: str, tmp_path: Path) -> None:
    """Several prefixes in one batch, next to texts without one, in any order and cut anywhere."""
    encoder, random = encoder_of(tmp_path / "model", case, dtype), np.random.default_rng(1)
    assert encoder.sharing.tasks == Task.EMBED
    for shared in (1, 15, 16, 97, 200):
        texts, prefixes = [*random_sequences([5, 130], 64)], [(0, 0), (0, 0)]
        for seed in (shared, shared + 1):
            owner = len(texts)
            (head,) = random_sequences([shared], 64, seed)
            tails = random_sequences([1, 40, 40, 3, 111], 64, seed + 100)
            texts += [np.concatenate([head, tail]) for tail in tails]
            prefixes += [(owner, 0), *((owner, int(random.integers(1, shared + 1))) for _ in tails[1:])]
        order = random.permutation(len(texts))
        moved = [(int(np.argsort(order)[prefixes[text][0]]), prefixes[text][1]) for text in order]
        batch = engine.pack([texts[text] for text in order])
        together = encoder.encode(batch.with_prefixes(np.array(moved, np.int32)))
        alone = [encoder.encode(engine.pack([texts[text]]))[0] for text in order]
        np.testing.assert_array_equal(together, alone)
    encoder.close()


@pytest.mark.parametrize(("case", "pooling"), [("qwen3", "mean"), ("lfm2", "last-token"), ("qwen2, both ways", "cls")])
def test_other_models_and_poolings_share_nothing(case: str, pooling: str, tmp_path: Path) -> None:
    build(tmp_path / "model", case)
    small_tokenizer(64).save(str(tmp_path / "model" / "tokenizer.json"))
    encoder = CpuEncoder(engine.load_model(str(tmp_path / "model"), pooling=pooling))
    assert encoder.sharing == NO_SHARING
    with pytest.raises(EncoderError, match="sequence 1 cannot continue 2 tokens"):
        encoder.submit(continue_first(engine.pack(random_sequences([5, 5], 64)), 2))
    encoder.close()


@pytest.mark.parametrize("wrong", [(1, 3), (0, 9), (2, 3), (0, -1)])
def test_prefixes_that_the_batch_does_not_have(wrong: tuple[int, int], tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path / "model", "qwen3")
    batch = engine.pack(random_sequences([8, 20], 64))
    batch = dataclasses.replace(batch, prefixes=np.array([(0, 0), wrong], np.int32))
    with pytest.raises(EncoderError, match="sequence 1 cannot continue"):
        encoder.submit(batch)
    encoder.close()


def test_prefix_of_texts() -> None:
    def found(*texts: Sequence[int], tasks: Task = Task.CLASSIFY, shares: Task = Task.CLASSIFY, **rules: Any) -> int:
        batch = engine.pack([np.array(text, np.int32) for text in texts])
        return common_prefix(batch.ids, np.diff(batch.cu_seqlens), tasks, Sharing(shares, **rules))

    many = list(range(100))
    assert found([*many, 1], [*many, 2, 3], [*many, 2]) == 100
    assert found(many, many) == 99  # each text has one row
    assert found(many, [*many[:40], 1]) == 40
    assert found(many, many[:16], many) == 0  # 15 tokens are too few
    assert found(many) == found([*many[:20], *range(1000)], many[:21]) == 0  # they save next to nothing
    assert found(many, many, tasks=Task.CLASSIFY | Task.TOKENS) == found(many, many, shares=NO_TASK) == 0
    assert found(many, [*many, 7], padding_id=7) == 0  # the row of an earlier token is read
    assert found(many, [*many, 7], padding_id=8) == 99
    assert found(many, many, step=8) == 96
    assert found(many[:20], many[:20], step=8) == 16
    assert found(many[:23], many[:23], step=32) == 0
    assert found(many[:32], many, least_text=33) == 0
    assert found(many[:33], many, least_text=33) == 32
    assert found(many, many, least_saved=99) == 99
    assert found(many, many, least_saved=100) == 0


def test_batches_of_one_call_share_its_prefix(tmp_path: Path) -> None:
    encoder, (head,) = encoder_of(tmp_path / "model", "qwen3"), random_sequences([60], 64)
    texts = [np.concatenate([head, tail]) for tail in random_sequences([40, 3, 100, 77, 40, 9], 64)]
    tokens: list[int] = []
    submit = encoder.submit
    encoder.submit = lambda batch: tokens.append(batch.tokens) or submit(batch)  # type: ignore[method-assign,func-returns-value]
    lengths = np.array([len(text) for text in texts], np.int32)
    encoded = Encoded(ids=np.concatenate(texts), lengths=lengths, truncated=0)
    rows: dict[int, Floats] = {}
    for numbers, outputs in encode_batches(encoder, encoded, Task.EMBED, budget=200):
        rows |= dict(zip(numbers.tolist(), outputs[Task.EMBED].values, strict=True))
    assert tokens == [160, 60 + 77 + 40, 60 + 40 + 9 + 3]
    for number, text in enumerate(texts):
        np.testing.assert_array_equal(rows[number], encoder.encode(engine.pack([text]))[0])
    encoder.close()
    assert [*spans(np.full(20, 160), 10_000, 60, 1000)] == [slice(0, 9), slice(9, 18), slice(18, 20)]


def test_questions_about_a_state_share_it(tmp_path: Path) -> None:
    folder = language_model(tmp_path, "qwen3", qwen, QWEN_TEMPLATE)
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        alone = [loaded.decide(STATE * 5, [question])[0] for question in QUESTIONS]
        tokens: list[int] = []
        submit = loaded.encoder.submit
        loaded.encoder.submit = lambda batch: tokens.append(batch.tokens) or submit(batch)  # type: ignore[method-assign,func-returns-value]
        assert loaded.decide(STATE * 5, QUESTIONS) == alone
        loaded.encoder.sharing = NO_SHARING
        assert loaded.decide(STATE * 5, QUESTIONS) == alone
    shared, unshared = tokens
    assert unshared - shared >= 2 * 5 * len(STATE.split())
