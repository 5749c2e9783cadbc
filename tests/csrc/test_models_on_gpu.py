"""A random checkpoint of every model_type on a GPU, against its own class in float64, and adapters.

Docs name a GPU for the families of these tests (scripts/generate/model_tables.py).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from embert import engine
from embert.engine import Question
from embert.engine.batch import PackedBatch
from embert.engine.encoders.cuda.encoder import CudaEncoder
from embert.engine.errors import UnsupportedModel
from embert.engine.heads.description import MarkerDecider
from embert.engine.model import Model
from embert.engine.tasks import Task
from tests.csrc.encoder.random_models import make_encoder
from tests.csrc.model_checkpoints import ModelCheckpoint, check_rounding, model_checkpoint
from tests.csrc.reference import row_errors
from tests.engine.conftest import random_sequences
from tests.engine.heads.classifiers import build_classifier, hugging_face_logits
from tests.engine.test_decisions import QWEN_TEMPLATE, SETTINGS, Scorer, language_model, laya
from tests.engine.test_decoders import qwen
from tests.oracles.jina_v3 import TASKS, VOCABULARY, Jina, peft
from tests.oracles.model_cases import CHECKPOINTS

pytestmark = pytest.mark.gpu

LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 126, 128, 5, 40]
MAX_TOKENS = 2048  # more than all texts, and than a graph takes


def made(model: Model, **options: Any) -> CudaEncoder:
    return make_encoder(model, **{"max_batch_tokens": MAX_TOKENS, **options})


@pytest.fixture(scope="module", params=CHECKPOINTS)
def of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelCheckpoint:
    return model_checkpoint(tmp_path_factory.mktemp("model_type"), request.param, LENGTHS)


@pytest.fixture(scope="module")
def encoder(of: ModelCheckpoint) -> Iterator[CudaEncoder]:
    encoder = made(of.model, dtype=usual_dtype(of))
    yield encoder
    encoder.close()


def usual_dtype(of: ModelCheckpoint) -> str:
    """float16 where it holds the model."""
    return "bfloat16" if of.model.config.wide_range else "float16"


def test_16_bits_are_as_near_as_transformers_class(of: ModelCheckpoint, encoder: CudaEncoder) -> None:
    assert encoder.encode(of.batch, Task.TOKENS).shape == (sum(LENGTHS), of.model.config.hidden_size)
    dtype = getattr(torch, encoder.dtype)
    check_rounding(encoder.encode(of.batch), of, dtype, folded=encoder.layernorm == "folded")


def test_bfloat16(of: ModelCheckpoint) -> None:
    encoder = made(of.model, dtype="bfloat16", graphs=False)
    check_rounding(encoder.encode(of.batch), of, torch.bfloat16, folded=encoder.layernorm == "folded")
    encoder.close()


def test_float32(of: ModelCheckpoint) -> None:
    if of.model.config.disentangled is not None:
        with pytest.raises(UnsupportedModel, match="disentangled attention in float32"):
            made(of.model, dtype="float32", graphs=False)
        return
    encoder = made(of.model, dtype="float32", graphs=False)
    assert row_errors(encoder.encode(of.batch), of.pooled(torch.float64)).max() <= 2e-5
    encoder.close()


def test_the_portable_products(of: ModelCheckpoint) -> None:
    encoder = made(of.model, dtype=usual_dtype(of), gemm="cublaslt", graphs=False)
    check_rounding(encoder.encode(of.batch), of, getattr(torch, encoder.dtype), folded=False)
    encoder.close()


def agrees(encoder: CudaEncoder, got: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> bool:
    """The same bits, where they are promised."""
    if encoder.gemm == "hopper":
        return got.tobytes() == other.tobytes()
    return bool(row_errors(got, other.astype(np.float64)).max() <= 1e-2)


def test_a_text_is_batch_invariant(of: ModelCheckpoint, encoder: CudaEncoder) -> None:
    """Alone, which is a graph, and with others, which may have other adapters."""
    together = encoder.encode(of.batch)
    random = np.random.default_rng(3)
    for _ in range(30):
        rows = random.permutation(len(LENGTHS))[: int(random.integers(1, len(LENGTHS) + 1))]
        assert agrees(encoder, encoder.encode(of.batch.take(rows)), together[rows])
    for row in range(len(LENGTHS)):
        assert agrees(encoder, encoder.encode(of.batch.take(np.array([row]))), together[row : row + 1])


@pytest.fixture(scope="module")
def jina(tmp_path_factory: pytest.TempPathFactory) -> Jina:
    return peft(tmp_path_factory.mktemp("jina"))


@pytest.fixture(scope="module")
def adapted(jina: Jina) -> Iterator[CudaEncoder]:
    encoder = made(engine.load_model(str(jina.folder)))
    yield encoder
    encoder.close()


def random_batch(random: np.random.Generator, most: int) -> PackedBatch:
    lengths = random.integers(1, 129, int(random.integers(1, most))).tolist()
    adapters = random.integers(-1, len(TASKS), len(lengths)).astype(np.int8)
    sequences = random_sequences(lengths, VOCABULARY, seed=int(random.integers(1 << 30)))
    return engine.pack(sequences, normalize=np.zeros(len(lengths), np.bool_), adapters=adapters)


def test_two_batches_of_many_adapters_in_flight(adapted: CudaEncoder) -> None:
    """Their parts run at the same time on different streams, and each text has the bits that it has alone."""
    random = np.random.default_rng(5)
    batches = [random_batch(random, 24) for _ in range(60)]
    single = [
        np.concatenate([adapted.encode(batch.take(np.array([row]))) for row in range(batch.sequences)])
        for batch in batches
    ]
    ticket, outputs = adapted.submit(batches[0]), []
    for following in batches[1:]:
        ahead = adapted.submit(following)
        outputs.append(adapted.wait(ticket)[Task.EMBED].values)
        ticket = ahead
    outputs.append(adapted.wait(ticket)[Task.EMBED].values)
    assert all(agrees(adapted, got, wanted) for got, wanted in zip(outputs, single, strict=True))


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("modernbert", {"classifier_pooling": "cls"}),
        ("modernbert", {"classifier_pooling": "mean"}),
        *((case, {"pad_token_id": 7}) for case in ("llama", "qwen2", "qwen3")),
    ],
)
def test_classification_heads(tmp_path: Path, case: str, config: dict[str, Any]) -> None:
    """Logits equal those of transformers' class, where padding at a text's end does not count, and are batch-invariant.

    ModernBERT's head runs on the host.
    """
    folder = build_classifier(tmp_path, case, **config)
    encoder = made(engine.load_model(str(folder)), dtype="float16")
    sequences = random_sequences(LENGTHS, 99, seed=9)
    if "pad_token_id" in config:
        sequences[3][-2:] = sequences[8][1:] = 7
    found = encoder.encode(engine.pack(sequences), Task.CLASSIFY)
    wanted = hugging_face_logits(folder, sequences)
    assert np.abs(found - wanted).max() <= 0.02 * np.abs(wanted).max()
    for row, ids in enumerate(sequences):
        single = encoder.encode(engine.pack([ids]), Task.CLASSIFY)
        assert single.tobytes() == found[row].tobytes() or encoder.gemm != "hopper"
    encoder.close()


@pytest.mark.parametrize("tied", [True, False])
def test_decisions_of_language_models(tmp_path: Path, tied: bool) -> None:
    folder = language_model(tmp_path, "qwen3", qwen, QWEN_TEMPLATE, tie_word_embeddings=tied)
    questions = [
        Question.predicate("they met"),
        Question.choice("where?", ["York", "in", "Angela"]),
        Question.score("how far?", ["near", "far"]),
    ]
    state = "Angela met Merkel in New York"
    with engine.Engine.load(str(folder), device="cpu") as exact, engine.Engine.load(str(folder), device="cuda") as ours:
        decided = ours.decide(state, questions, label_mass=True)
        for found, expected in zip(decided, exact.decide(state, questions, label_mass=True), strict=True):
            np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=0.01)
            assert found.label_mass == pytest.approx(expected.label_mass, abs=0.01)
        assert [ours.decide(state, [question], label_mass=True)[0] for question in questions] == decided
        plain = [dataclasses.replace(each, label_mass=None) for each in decided]
        assert ours.decide(state, questions) == plain


@pytest.fixture(scope="module")
def decider(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Scorer]:
    """A model in Laya's layout: its folder, its encoder and its head."""
    folder = tmp_path_factory.mktemp("laya")
    encoder, scorer = laya(folder)
    (folder / "rl_agent_config.json").write_text(json.dumps({**SETTINGS, "max_len": 128}))
    return folder, encoder, scorer


def marker_of(model: Model) -> int:
    assert isinstance(model.heads.decider, MarkerDecider)
    return model.heads.decider.marker


def marked_batch(model: Model) -> tuple[PackedBatch, npt.NDArray[np.int32]]:
    """Texts with markers at random and one at the start, and the type of each."""
    random, lengths = np.random.default_rng(4), [*LENGTHS, *np.random.default_rng(5).integers(60, 129, 40)]
    texts = random_sequences(lengths, 390, seed=6)
    for text in texts:
        text[(random.random(len(text)) < 0.1) | (np.arange(len(text)) == 0)] = marker_of(model)
    types, tasks = random.integers(0, 3, len(texts)).astype(np.int32), np.full(len(texts), Task.DECIDE, np.uint8)
    return dataclasses.replace(engine.pack(texts), token_types=np.repeat(types, lengths), tasks=tasks), types


def decide(encoder: CudaEncoder, batch: PackedBatch) -> npt.NDArray[np.float32]:
    return encoder.wait(encoder.submit(batch))[Task.DECIDE].values


@pytest.mark.parametrize(
    ("dtype", "gemm"), [("float16", "auto"), ("bfloat16", "auto"), ("float16", "cublaslt"), ("float32", "auto")]
)
def test_decisions_of_layers_after_an_encoder(decider: tuple[Path, Any, Scorer], dtype: str, gemm: str) -> None:
    """The error of logits is that of torch in the same type, and a text has the same bits alone and with others."""
    folder, *modules = decider
    model = engine.load_model(str(folder))
    encoder, batch, types = made(model, dtype=dtype, gemm=gemm, max_batch_tokens=8192), *marked_batch(model)
    together = decide(encoder, batch)

    def logits(of: torch.dtype) -> npt.NDArray[np.float64]:
        states, scorer = (copy.deepcopy(module).to("cuda", of) for module in modules)
        rows = np.zeros(together.shape)
        for row, (begin, end) in enumerate(itertools.pairwise(batch.cu_seqlens)):
            ids = torch.tensor(batch.ids[begin:end], device="cuda")
            with torch.inference_mode():
                hidden = states(ids[None].long()).last_hidden_state + scorer.type_emb.weight[types[row]]
                found = scorer.scorer(scorer.head(hidden))[0, ids == marker_of(model), 0]
            rows[row, : len(found)] = found.double().cpu().numpy()
        return rows

    exact = logits(torch.float64)
    ours, theirs = (np.sqrt(np.square(found - exact).mean()) for found in (together, logits(getattr(torch, dtype))))
    print(f"{dtype} {encoder.gemm} error {ours:.2e}, torch {theirs:.2e}: {ours / theirs:.2f}; {encoder.choice}")
    assert ((together == 0) == (exact == 0)).all()
    assert ours <= 1.25 * theirs
    random = np.random.default_rng(3)
    for _ in range(10):
        rows = random.permutation(batch.sequences)[: int(random.integers(1, 20))]
        assert agrees(encoder, decide(encoder, batch.take(rows)), together[rows])
    for row in range(batch.sequences):
        assert agrees(encoder, decide(encoder, batch.take(np.array([row]))), together[row : row + 1])
    encoder.close()
