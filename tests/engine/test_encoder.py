"""The CPU encoder compared with HuggingFace in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from embert import engine
from embert.engine.batch import PackedBatch
from embert.engine.encoders.base import Encoder
from embert.engine.errors import EncoderError
from embert.engine.model import Model
from embert.engine.tasks import Task
from tests.engine.conftest import BuildBert, Floats, HuggingFace, random_sequences, unit

LENGTHS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 5, 5, 5, 64, 127, 128]


@pytest.fixture(scope="module")
def oracle(real_texts: list[str], tokenizer: engine.Tokenizer, hugging_face: HuggingFace) -> Floats:
    encoded = tokenizer.encode(real_texts)
    pieces = np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])
    rows = np.empty((len(real_texts), 384), np.float32)
    for length in np.unique(encoded.lengths):
        (same,) = np.nonzero(encoded.lengths == length)
        rows[same] = hugging_face.hidden(np.stack([pieces[i] for i in same])).mean(1)
    return unit(rows)


# The bfloat16 error is 7.0e-3. With LayerNorms' gamma and beta in bfloat16, too, it would be 8.9e-3.
@pytest.mark.parametrize(
    ("name", "cosine", "error"),
    [
        pytest.param("float32_encoder", 0.999999, 5e-6, marks=pytest.mark.instructions),
        ("bfloat16_encoder", 0.9998, 8e-3),
    ],
)
def test_real_texts_equal_hugging_face(
    name: str,
    cosine: float,
    error: float,
    request: pytest.FixtureRequest,
    default_model: Model,
    tokenizer: engine.Tokenizer,
    real_texts: list[str],
    oracle: Floats,
) -> None:
    encoder: Encoder = request.getfixturevalue(name)
    vectors = engine.Engine(default_model, tokenizer, encoder).embed(real_texts)
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(real_texts), 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    cosines = (vectors.astype(np.float64) * oracle).sum(1) / np.linalg.norm(oracle, axis=1)
    assert cosines.min() >= cosine, real_texts[int(cosines.argmin())][:80]
    assert np.linalg.norm(vectors - oracle) <= error * np.linalg.norm(oracle)


@pytest.mark.parametrize(
    ("config", "runs"),
    [
        pytest.param({"num_attention_heads": 1}, None, id="head size 64"),
        pytest.param({"hidden_size": 60, "num_attention_heads": 3, "intermediate_size": 70}, None, id="odd sizes"),
        pytest.param({"type_vocab_size": 5, "layer_norm_eps": 1e-3}, None, id="five token types, large epsilon"),
        pytest.param({}, (1, 50), id="runs of at most 50 tokens"),
        pytest.param({}, (100_000, 100_000), id="one run"),
    ],
)
@pytest.mark.instructions
@pytest.mark.usefixtures("products")
def test_hidden_states_and_means_equal_hugging_face(
    build_bert: BuildBert, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], runs: tuple[int, int] | None
) -> None:
    for name, tokens in zip(("MIN_RUN_TOKENS", "MAX_RUN_TOKENS"), runs or (), strict=False):
        monkeypatch.setattr(f"embert.engine.encoders.cpu.runs.{name}", tokens)
    folder = build_bert(**config)
    model = engine.load_model(str(folder))
    reference = HuggingFace(folder)
    sequences = random_sequences(LENGTHS, model.config.vocab_size)
    types = random_sequences(LENGTHS, model.config.type_vocab_size, seed=1)
    encoder = engine.load_encoder(model, device="cpu")
    for token_types in (None, types):
        batch = engine.pack(sequences, token_types=token_types)
        kinds = zip(sequences, types, strict=True)
        expected = [reference.hidden(ids, each if token_types else None) for ids, each in kinds]
        hidden = encoder.encode(batch, Task.TOKENS)
        assert hidden.shape == (sum(LENGTHS), model.config.hidden_size)
        np.testing.assert_allclose(hidden, np.concatenate(expected), atol=2e-4)
        np.testing.assert_allclose(encoder.encode(batch), unit(np.stack([h.mean(0) for h in expected])), atol=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "last-token"])
@pytest.mark.instructions
@pytest.mark.usefixtures("products")
def test_last_layer_on_pooled_rows_only(build_bert: BuildBert, pooling: str) -> None:
    model = engine.load_model(str(build_bert()), pooling=pooling)
    encoder = engine.load_encoder(model, device="cpu")
    for lengths in (LENGTHS * 4, [1]):
        batch = engine.pack(random_sequences(lengths, model.config.vocab_size))
        states = encoder.encode(batch, Task.TOKENS)
        rows = batch.cu_seqlens[:-1] if pooling == "cls" else batch.cu_seqlens[1:] - 1
        np.testing.assert_allclose(encoder.encode(batch), unit(states[rows]), atol=1e-6)


def test_dimensions_and_normalize_by_row(float32_encoder: Encoder) -> None:
    sequences = random_sequences([9, 3, 12, 3], 30_000)
    plain = float32_encoder.encode(engine.pack(sequences, normalize=np.zeros(4, np.bool_)))
    assert abs(np.linalg.norm(plain[0]) - 1) > 0.1
    vectors = float32_encoder.encode(
        engine.pack(
            sequences, dimensions=np.array([0, 384, 7, 7], np.int32), normalize=np.array([True, False, True, False])
        )
    )
    np.testing.assert_allclose(vectors[0], unit(plain[0]), atol=1e-6)
    np.testing.assert_allclose(vectors[1], plain[1], atol=1e-6)
    np.testing.assert_allclose(vectors[2, :7], unit(plain[2, :7]), atol=1e-6)
    np.testing.assert_allclose(vectors[3, :7], plain[3, :7], atol=1e-6)
    assert not vectors[2:, 7:].any()


@pytest.mark.parametrize(
    "stored",
    [{"dtype": torch.float16}, {"dtype": torch.bfloat16}, {"dtype": torch.float64}, {"shard_size": "100KB"}],
    ids=str,
)
def test_checkpoints_of_other_precisions_and_in_several_files(build_bert: BuildBert, stored: dict[str, Any]) -> None:
    folder = build_bert(**stored)
    assert len(list(folder.glob("*.safetensors"))) > ("shard_size" in stored)
    model = engine.load_model(str(folder))
    sequences = random_sequences(LENGTHS, model.config.vocab_size)
    hidden = engine.load_encoder(model, device="cpu").encode(engine.pack(sequences), Task.TOKENS)
    expected = np.concatenate(list(map(HuggingFace(folder).hidden, sequences)))
    np.testing.assert_allclose(hidden, expected, atol=2e-4)


def test_empty_batch(float32_encoder: Encoder) -> None:
    empty = engine.pack([])
    assert (empty.tokens, empty.sequences) == (0, 0)
    assert float32_encoder.encode(empty).shape == (0, 384)
    assert float32_encoder.wait(float32_encoder.submit(empty.with_tasks(Task.TOKENS))) == {}


def test_two_batches_in_flight_and_arrays_used_again(float32_encoder: Encoder) -> None:
    first, second = engine.pack(random_sequences([4, 30], 9000)), engine.pack(random_sequences([8, 8, 8], 9000, seed=1))
    expected = float32_encoder.encode(first), float32_encoder.encode(second)
    tickets = float32_encoder.submit(first), float32_encoder.submit(second)
    first.ids[:] = second.ids[:] = 0
    np.testing.assert_array_equal(float32_encoder.wait(tickets[1])[Task.EMBED].values, expected[1])
    np.testing.assert_array_equal(float32_encoder.wait(tickets[0])[Task.EMBED].values, expected[0])


def test_batch_over_the_limit(default_model: Model) -> None:
    encoder = engine.load_encoder(default_model, device="cpu", max_batch_tokens=300)
    assert encoder.max_batch_tokens == 300
    with pytest.raises(ValueError, match="a batch of 301 tokens is over this encoder's limit of 300"):
        encoder.submit(engine.pack(random_sequences([100, 201], 9000)))


def test_a_sequence_longer_than_the_models_positions(float32_encoder: Encoder) -> None:
    with pytest.raises(EncoderError, match=r"513 tokens.*512 positions"):
        float32_encoder.submit(engine.pack(random_sequences([513], 9001)))


@pytest.mark.parametrize("bad", [30_522, -1])
def test_forward_that_fails_names_its_shape_and_leaves_the_encoder_usable(float32_encoder: Encoder, bad: int) -> None:
    good = engine.pack(random_sequences([4, 30], 9000))
    expected = float32_encoder.encode(good)
    with pytest.raises(EncoderError, match=r"the forward of 1 sequences, 2 tokens, longest 2, float32, failed: .+"):
        float32_encoder.encode(PackedBatch(np.array([101, bad], np.int32), np.array([0, 2], np.int32)))
    np.testing.assert_array_equal(float32_encoder.encode(good), expected)
