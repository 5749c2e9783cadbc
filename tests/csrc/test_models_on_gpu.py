"""A random checkpoint of every model_type on a GPU, against its own class in float64, and adapters.

Docs name a GPU for the families of these tests (scripts/generate/model_tables.py).
"""

from __future__ import annotations

import dataclasses
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
from embert.engine.errors import EncoderError, InputError, UnsupportedModel
from embert.engine.memory_estimate import estimate_memory
from embert.engine.model import Model
from embert.engine.tasks import Task
from tests.csrc.encoder.random_models import make_encoder
from tests.csrc.model_checkpoints import CHECKPOINTS, ModelCheckpoint, check_rounding, errors, model_checkpoint
from tests.engine.conftest import random_sequences
from tests.engine.heads.classifiers import build_classifier, hugging_face_logits
from tests.engine.test_decisions import QWEN_TEMPLATE, language_model
from tests.engine.test_decoders import qwen
from tests.oracles.jina_v3 import TASKS, VOCABULARY, Jina, peft

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
    assert errors(encoder.encode(of.batch), of.pooled(torch.float64)).max() <= 2e-5
    encoder.close()


def test_the_portable_products(of: ModelCheckpoint) -> None:
    encoder = made(of.model, dtype=usual_dtype(of), gemm="cublaslt", graphs=False)
    check_rounding(encoder.encode(of.batch), of, getattr(torch, encoder.dtype), folded=False)
    encoder.close()


def agrees(encoder: CudaEncoder, got: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> bool:
    """The same bits, where they are promised."""
    if encoder.gemm == "hopper":
        return got.tobytes() == other.tobytes()
    return bool(errors(got, other.astype(np.float64)).max() <= 1e-2)


def test_a_text_is_batch_invariant(of: ModelCheckpoint, encoder: CudaEncoder) -> None:
    """Alone, which is a graph, and with others, which may have other adapters."""
    together = encoder.encode(of.batch)
    random = np.random.default_rng(3)
    for _ in range(30):
        rows = random.permutation(len(LENGTHS))[: int(random.integers(1, len(LENGTHS) + 1))]
        assert agrees(encoder, encoder.encode(of.batch.taken(rows)), together[rows])
    for row in range(len(LENGTHS)):
        assert agrees(encoder, encoder.encode(of.batch.taken(np.array([row]))), together[row : row + 1])


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
        np.concatenate([adapted.encode(batch.taken(np.array([row]))) for row in range(batch.sequences)])
        for batch in batches
    ]
    ticket, outputs = adapted.submit(batches[0]), []
    for following in batches[1:]:
        ahead = adapted.submit(following)
        outputs.append(adapted.wait(ticket)[Task.EMBED].values)
        ticket = ahead
    outputs.append(adapted.wait(ticket)[Task.EMBED].values)
    assert all(agrees(adapted, got, wanted) for got, wanted in zip(outputs, single, strict=True))


def test_a_third_batch_leaves_nothing_behind(adapted: CudaEncoder) -> None:
    batch = random_batch(np.random.default_rng(6), 20)
    wanted = adapted.encode(batch)
    tickets = [adapted.submit(batch) for _ in range(2)]
    for _ in range(3):
        with pytest.raises(EncoderError, match="in flight"):
            adapted.submit(batch)
    for ticket in tickets:
        assert agrees(adapted, adapted.wait(ticket)[Task.EMBED].values, wanted)
    few = [adapted.submit(batch.taken(np.array([0]))) for _ in range(2)]  # fills the encoder of one adapter
    with pytest.raises(EncoderError, match="in flight"):
        adapted.submit(batch)
    for ticket in few:
        adapted.wait(ticket)
    assert agrees(adapted, adapted.encode(batch), wanted)


def test_memory_is_six_times_that_of_the_model(jina: Jina, adapted: CudaEncoder) -> None:
    model = engine.load_model(str(jina.folder))
    plain = dataclasses.replace(model, config=dataclasses.replace(model.config, adapters=None))
    encoder = made(plain)
    print("bytes with adapters", adapted.memory, "without", encoder.memory)
    assert adapted.memory[0] == 6 * encoder.memory[0]
    planned, single = (estimate_memory(each, device="cuda", max_batch_tokens=MAX_TOKENS) for each in (model, plain))
    assert (planned.weights, planned.activations) == (6 * single.weights, 6 * single.activations)
    encoder.close()


@pytest.mark.parametrize("pooling", ["cls", "last-token", "max"])
def test_other_poolings_with_adapters(jina: Jina, pooling: str) -> None:
    """For the first two only some rows go through the end of the last layer."""
    model = engine.load_model(str(jina.folder), pooling=pooling)
    encoder, cpu = made(model), engine.load_encoder(model, device="cpu")
    batch = random_batch(np.random.default_rng(8), 30)
    wanted = cpu.encode(batch).astype(np.float64)
    assert errors(encoder.encode(batch), wanted).max() <= 1e-2
    encoder.close()


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


def test_decisions_of_language_models(tmp_path: Path) -> None:
    folder = language_model(tmp_path, "qwen3", qwen, QWEN_TEMPLATE)
    questions = [
        Question.predicate("they met"),
        Question.choice("where?", ["York", "in", "Angela"]),
        Question.score("how far?", ["near", "far"]),
    ]
    state = "Angela met Merkel in New York"
    with engine.Engine.load(str(folder), device="cpu") as exact, engine.Engine.load(str(folder), device="cuda") as ours:
        decided = ours.decide(state, questions)
        for found, expected in zip(decided, exact.decide(state, questions), strict=True):
            np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=0.01)
        assert [ours.decide(state, [question])[0] for question in questions] == decided
        with pytest.raises(InputError, match="this model runs on a GPU"):
            ours.decide(state, questions, label_mass=True)
