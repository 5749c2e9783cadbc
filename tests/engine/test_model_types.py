"""Every family beside HuggingFace: names of tensors and fields, positions, tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from tokenizers import Tokenizer as Backend
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from embert import engine
from embert.engine.encoders.cuda import encoder as cuda
from embert.engine.encoders.positions import buckets
from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.models import MODEL_TYPES as READERS
from embert.engine.tasks import Task
from tests.engine.conftest import Floats, HuggingFace, random_sequences, unit
from tests.engine.model_cases import MODEL_CASES, build, byte_level, unigram
from tests.engine.stand_in_gpu import StandInGpu
from tests.server.models import edit_json


def test_every_family_has_a_model_here() -> None:
    # For new transformers has no class: see architectures/test_gte.py.
    assert {name.partition(",")[0] for name in MODEL_CASES} | {"new"} == set(READERS)


@pytest.mark.parametrize("family", [name for name in MODEL_CASES if "long" not in name])
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM"])
def test_hidden_states_equal_hugging_face(tmp_path: Path, family: str, head: str) -> None:
    folder = build(tmp_path, family, head=head)
    byte_level(300).save(str(folder / "tokenizer.json"))
    model = engine.load_model(str(folder))
    assert (model.config.model_type, model.config.max_positions) == (family.partition(",")[0], 128)
    sequences = [ids % 50 + 10 for ids in random_sequences([1, 2, 15, 16, 17, 64, 65, 127, 128], 64)]  # no padding
    hidden = engine.load_encoder(model, device="cpu").encode(engine.pack(sequences), Task.TOKENS)
    expected = np.concatenate(list(map(HuggingFace(folder).hidden, sequences)))
    np.testing.assert_allclose(hidden, expected, atol=2e-4)


def with_padding_inside(padding: int) -> list[npt.NDArray[np.int32]]:
    """Texts with padding tokens first, in the middle, last, several, or nothing else, and texts without any."""
    patterns = [
        "p",
        "pt",
        "tp",
        "tptt",
        "ttpp",
        "pptt",
        "ptptp",
        "pppp",
        "tttt",
        "t",
        "tttp" * 30,
        "p" * 128,
        "t" * 128,
    ]
    random = np.random.default_rng(0)
    return [
        np.array([padding if each == "p" else random.integers(10, 60) for each in pattern], np.int32)
        for pattern in patterns
    ]


@pytest.mark.parametrize("family", [name for name in MODEL_CASES if "long" not in name])
def test_padding_tokens_inside_texts_stand_where_hugging_face_puts_them(tmp_path: Path, family: str) -> None:
    folder = build(tmp_path, family)
    byte_level(300).save(str(folder / "tokenizer.json"))
    model = engine.load_model(str(folder))
    padding = json.loads((folder / "config.json").read_text()).get("pad_token_id", 1)
    expects_rule = family.partition(",")[0] in ("roberta", "xlm-roberta", "camembert", "mpnet")
    assert model.config.padding_id == (padding if expects_rule else None)
    sequences = with_padding_inside(padding)
    encoder, reference = engine.load_encoder(model, device="cpu"), HuggingFace(folder)
    expected = np.concatenate(list(map(reference.hidden, sequences)))
    np.testing.assert_allclose(encoder.encode(engine.pack(sequences), Task.TOKENS), expected, atol=2e-4)
    # The same for each text alone, pooled.
    for ids in sequences:
        wanted = unit(reference.pooled(ids, "mean"))
        np.testing.assert_allclose(encoder.encode(engine.pack([ids]))[0], wanted, atol=1e-5)


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta"])
def test_texts_that_spell_out_the_padding_token(tmp_path: Path, family: str) -> None:
    folder = build(tmp_path, family, vocab_size=400)
    backend = byte_level(400)
    backend.save(str(folder / "tokenizer.json"))
    texts = ["hello <pad> world", "<pad> hello", "hello<pad>", "<pad><pad>hello<pad>", "<pad>", "hello world"]
    reference = HuggingFace(folder)
    tokens = [backend.encode(text).ids for text in texts]
    assert [ids.count(1) for ids in tokens] == [1, 1, 1, 3, 1, 0]
    wanted: Floats = np.stack([reference.hidden(np.array(ids)).mean(0) for ids in tokens])
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        np.testing.assert_allclose(loaded.embed(texts), unit(wanted), atol=1e-5)


@pytest.mark.parametrize(("dtype", "cosine"), [("float32", 0.999999), ("bfloat16", 0.999)])
def test_relative_positions_of_long_texts(tmp_path: Path, dtype: str, cosine: float) -> None:
    folder = build(tmp_path, "mpnet, long")
    byte_level(300).save(str(folder / "tokenizer.json"))
    encoder = engine.load_encoder(engine.load_model(str(folder)), device="cpu", dtype=dtype)
    # Several sequences of a length, and scores that are computed for some heads of a sequence at a time.
    sequences = [ids % 50 + 10 for ids in random_sequences([512, 3, 512, 129, 40, 40, 40, 200, 500], 64)]
    expected = unit(np.stack([HuggingFace(folder).hidden(ids).mean(0) for ids in sequences]))
    vectors = encoder.encode(engine.pack(sequences))
    assert (vectors * expected).sum(1).min() >= cosine
    alone = [encoder.encode(engine.pack([ids]))[0] for ids in sequences]
    np.testing.assert_allclose(vectors, alone, atol=1e-5 if dtype == "float32" else 0.02)


def test_buckets_of_distances_equal_hugging_face() -> None:
    distances = np.arange(-9000, 9001)
    theirs: Any = MPNetEncoder
    wanted = theirs.relative_position_bucket(torch.from_numpy(distances))
    np.testing.assert_array_equal(buckets(distances, 32), wanted.numpy())


@pytest.mark.parametrize("family", ["mpnet", "distilbert"])
def test_what_a_gpu_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    folder = build(tmp_path, family)
    byte_level(300).save(str(folder / "tokenizer.json"))
    model = engine.load_model(str(folder))
    gpu = StandInGpu(model)
    monkeypatch.setattr(cuda, "_extension", lambda: gpu)
    assert engine.load_encoder(model).device == "cuda:0"
    (ours,) = gpu.encoders
    theirs: Any = transformers.AutoModel.from_pretrained(folder)
    assert (ours.shape["positions"], ours.shape["types"]) == (128, 1)
    assert not ours.loaded["type", -1].any()
    places = theirs.embeddings.position_embeddings.weight.detach().numpy()
    np.testing.assert_array_equal(ours.loaded["position", -1].reshape(128, 64), places[len(places) - 128 :])
    assert ours.shape["padding"] == (family == "mpnet")
    if family == "mpnet":
        np.testing.assert_array_equal(ours.loaded["padding", -1], places[1:2])
    assert ours.shape["relative"] == (family == "mpnet") == (("relative", -1) in ours.loaded)
    if family == "mpnet":
        with torch.inference_mode():
            scores = theirs.encoder.compute_position_bias(torch.zeros(1, 128, 64))[0].numpy()
        by_distance = ours.loaded["relative", -1].reshape(4, 255)
        positions = np.arange(128)
        np.testing.assert_array_equal(by_distance[:, positions - positions[:, None] + 127], scores)


@pytest.mark.timeout(60)  # passes only if kernels are not made at load for every length up to 8 192
@pytest.mark.parametrize(("dtype", "cosine"), [("float32", 0.999999), ("bfloat16", 0.999)])
def test_a_model_for_long_texts(tmp_path: Path, dtype: str, cosine: float) -> None:
    folder = build(tmp_path, "xlm-roberta, long")
    byte_level(300).save(str(folder / "tokenizer.json"))
    model = engine.load_model(str(folder))
    assert model.max_input_length == 8192
    encoder = engine.load_encoder(model, device="cpu", dtype=dtype)
    assert encoder.max_batch_tokens == 8192
    sequences = [ids % 50 + 10 for ids in random_sequences([2000, 30, 513], 64)]
    expected = unit(np.stack([HuggingFace(folder).hidden(ids).mean(0) for ids in sequences]))
    assert (encoder.encode(engine.pack(sequences)) * expected).sum(1).min() >= cosine


@pytest.mark.parametrize("kind", [byte_level, unigram])
def test_texts_to_vectors(tmp_path: Path, kind: Any) -> None:
    backend: Backend = kind(400)
    folder = build(tmp_path, "xlm-roberta", vocab_size=400)
    backend.save(str(folder / "tokenizer.json"))
    texts = [
        "a",
        "",
        " two  spaces ",
        "RoBERTa, XLM-RoBERTa",
        "déjà vu 日本",
        "</s> inside",
        "def build(folder): " * 40,
    ]
    reference = HuggingFace(folder)
    backend.enable_truncation(128)
    wanted: Floats = np.stack([reference.hidden(np.array(backend.encode(text).ids)).mean(0) for text in texts])
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        np.testing.assert_allclose(loaded.embed(texts), unit(wanted), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "fields", "error", "message"),
    [
        ("roberta", {"pad_token_id": -1}, BrokenModel, "pad_token_id must be an int of at least 0, found -1"),
        ("roberta", {"pad_token_id": True}, BrokenModel, "pad_token_id must be an int of at least 0, found True"),
        ("roberta", {"max_position_embeddings": 2}, BrokenModel, "max_position_embeddings must be above 2, which is"),
        ("roberta", {"max_position_embeddings": 514}, BrokenModel, r"has shape \[130, 64\], config.json implies \[514"),
        ("mpnet", {"relative_attention_num_buckets": 0}, UnsupportedModel, "num_buckets 0 is not supported"),
        ("mpnet", {"relative_attention_num_buckets": 64}, UnsupportedModel, "num_buckets 64 is not supported"),
        ("mpnet", {"num_attention_heads": 8}, BrokenModel, r"relative_attention_bias\.weight has shape \[32, 4\]"),
        ("distilbert", {"n_layers": 0}, BrokenModel, "n_layers must be a positive int, found 0"),
        ("distilbert", {"n_heads": 5}, UnsupportedModel, "dim 64 is not a multiple of n_heads 5"),
        ("distilbert", {"activation": "silu"}, UnsupportedModel, "activation 'silu' is not supported"),
        ("distilbert", {"n_layers": 3}, BrokenModel, r"has no tensor transformer\.layer\.2\.attention\.q_lin\.weight"),
    ],
)
def test_what_cannot_be_read_is_named_as_the_model_names_it(
    tmp_path: Path, family: str, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    folder = build(tmp_path, family)
    byte_level(300).save(str(folder / "tokenizer.json"))
    edit_json(folder / "config.json", **fields)
    with pytest.raises(error, match=message):
        engine.load_encoder(engine.load_model(str(folder)), device="cpu")
