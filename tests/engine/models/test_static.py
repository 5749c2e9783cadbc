"""Static embeddings, compared with sentence-transformers, which reads Model2Vec's files too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer as Library

from embert import engine
from embert.engine.encoders.cpu.static import CHUNK_TOKENS
from embert.engine.errors import InputError, ModelError
from embert.engine.models.flops import TokenCounts
from embert.engine.tasks import Task
from tests.engine.conftest import unit
from tests.engine.heads.late_interaction import words
from tests.oracles.model_cases import list_modules
from tests.oracles.sentences import sentence_transformer

COLUMNS = 24
RANDOM = np.random.default_rng(1)
TEXTS = ["it is a cat!", "a", "[UNK] and [CLS] é", "no dog, no cat. " * 200, "one two", "who is it?"]
STATIC = "sentence_transformers.models.StaticEmbedding"


def model2vec(folder: Path, *, modules: bool = True, path: str = ".", normalize: bool = True, **tensors: Any) -> Path:
    """Model2Vec's files; without `modules` those of its first versions."""
    folder.mkdir(exist_ok=True)
    inner = folder / path
    inner.mkdir(exist_ok=True)
    library = words()
    library.save(str(inner / "tokenizer.json"))
    rows = library.get_vocab_size()
    stored = {"embeddings": random(rows), **tensors}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, inner / "model.safetensors")
    config = {"model_type": "model2vec", "normalize": normalize, "apply_pca": 256, "seq_length": 1_000_000}
    (folder / "config.json").write_text(json.dumps(config))
    if modules:
        kinds = [(STATIC, path), ("sentence_transformers.models.Normalize", "1_Normalize")]
        list_modules(folder, *kinds[: 1 + normalize])
    return folder


def random(*shape: int) -> Any:
    return RANDOM.standard_normal(shape if len(shape) > 1 else (*shape, COLUMNS)).astype(np.float32)


def library(folder: Path, *, limit: int = 0, direction: str = "right", dense: bool = False) -> Path:
    """Files as sentence-transformers writes them."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, StaticEmbedding

    tokenizer: Library = words()
    if limit:
        tokenizer.enable_truncation(limit, direction=direction)
    torch.manual_seed(0)
    modules: list[torch.nn.Module] = [StaticEmbedding(tokenizer, embedding_dim=COLUMNS)]
    modules += [Normalize(), Dense(COLUMNS, 40), Normalize()] if dense else []
    SentenceTransformer(modules=modules, prompts={"query": "who, ", "document": ""}).save(str(folder))
    return folder


ROWS = words().get_vocab_size()
VOCABULARY: dict[str, Any] = {"mapping": RANDOM.integers(0, 9, ROWS), "weights": RANDOM.random(ROWS).astype(np.float32)}
CASES: dict[str, Any] = {
    "sentence-transformers": library,
    "modules after it": lambda folder: library(folder, dense=True),
    "cut": lambda folder: library(folder, limit=7),
    "cut at the left": lambda folder: library(folder, limit=7, direction="left"),
    "Model2Vec": model2vec,
    "in a folder": lambda folder: model2vec(folder, path="0_StaticEmbedding", normalize=False),
    "float64": lambda folder: model2vec(folder, embeddings=random(ROWS).astype(np.float64)),
    "weights": lambda folder: model2vec(folder, weights=VOCABULARY["weights"]),
    "quantized vocabulary": lambda folder: model2vec(folder, embeddings=random(9), **VOCABULARY),
}


@pytest.mark.parametrize("case", CASES)
def test_vectors_are_those_of_sentence_transformers(case: str, tmp_path: Path) -> None:
    folder = CASES[case](tmp_path / "model")
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        oracle = sentence_transformer(folder)
        prompt = "query" if oracle.prompts.get("query") else None
        expected = oracle.encode(TEXTS, prompt_name=prompt)
        got = loaded.embed(TEXTS, prompt_name=prompt, normalize=False)
        if loaded.model.normalize:
            got = unit(got)
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
        few = unit(oracle.encode(TEXTS, prompt_name=prompt, truncate_dim=8))
        np.testing.assert_allclose(loaded.embed(TEXTS, prompt_name=prompt, dimensions=8), few, rtol=0, atol=2e-5)


def test_a_row_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    folder = library(tmp_path / "model", dense=True)
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        texts = [*TEXTS, "a b " * CHUNK_TOKENS, "it is a dog!"] * 3
        together = loaded.embed(texts)
        for text, row in zip(texts, together, strict=True):
            assert (loaded.embed([text])[0] == row).all()


def test_files_of_model2vec_without_modules(tmp_path: Path) -> None:
    modules, bare = (model2vec(tmp_path / str(flag), modules=flag) for flag in (True, False))
    bare.joinpath("model.safetensors").write_bytes(modules.joinpath("model.safetensors").read_bytes())
    with engine.Engine.load(str(modules)) as loaded, engine.Engine.load(str(bare), device="cpu") as first:
        assert (first.model.normalize, first.model.notices) == (True, ())
        assert (loaded.model.max_input_length, first.model.max_input_length) == (1 << 20, 512)
        assert (loaded.embed(TEXTS[:3]) == first.embed(TEXTS[:3])).all()
        assert TokenCounts(loaded.model.config).of([100_000]) == [100_000]
        encoded = loaded.tokenizer.encode(TEXTS[:1])
        batch = engine.pack([encoded.ids])
        (row,) = loaded.encoder.encode(batch)
        rows = loaded.encoder.encode(batch, Task.TOKENS)
        np.testing.assert_allclose(unit(rows.mean(0, keepdims=True))[0], row, rtol=0, atol=1e-6)
        with pytest.raises(InputError, match="text 0 has no tokens"):
            loaded.embed([" "])


def test_integer_rows_are_numbers(tmp_path: Path) -> None:
    rows = RANDOM.integers(-127, 128, (ROWS, COLUMNS)).astype(np.int8)
    small = model2vec(tmp_path / "small", embeddings=rows)
    large = model2vec(tmp_path / "large", embeddings=rows.astype(np.float32))
    with engine.Engine.load(str(small)) as one, engine.Engine.load(str(large)) as other:
        assert (one.embed(TEXTS) == other.embed(TEXTS)).all()


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "shape of the table": ({"embeddings": random(2, 3, 4)}, {}, "embeddings has shape [2, 3, 4]"),
    "no table": ({"embeddings": None, "other": random(3)}, {}, "no tensor embedding.weight or embeddings"),
    "dtype": ({"embeddings": np.zeros((ROWS, 4), np.int32)}, {}, "embeddings has dtype I32"),
    "fewer rows than tokens": ({"embeddings": random(5)}, {}, "has embeddings for ids 0 to 4"),
    "shape of the mapping": ({"mapping": np.zeros((ROWS, 1), np.int64)}, {}, f"mapping has shape [{ROWS}, 1]"),
    "negative row": ({"mapping": np.full(ROWS, -1)}, {}, f"mapping of token 0 must be 0 to {ROWS - 1}, found -1"),
    "row past the end": ({"mapping": np.full(ROWS, ROWS)}, {}, f"to {ROWS - 1}, found {ROWS}"),
    "shape of the weights": ({"weights": np.ones(3, np.float32)}, {}, f"weights has shape [3], expected [{ROWS}]"),
    "NaN": ({"weights": np.full(ROWS, np.nan, np.float32)}, {}, "weights of token 0 is not finite: nan"),
    "device": ({}, {"device": "cuda"}, "device cuda cannot be used"),
    "dtype of the encoder": ({}, {"dtype": "int8"}, "dtype int8 is not supported for static embeddings"),
    "pooling": ({}, {"pooling": "cls"}, "pooling 'cls' is not supported for static embeddings"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named(case: str, tmp_path: Path) -> None:
    tensors, options, message = REFUSED[case]
    folder = model2vec(tmp_path / "model", **{"embeddings": random(ROWS), **tensors})
    with pytest.raises(ModelError) as error:
        engine.Engine.load(str(folder), **options)
    assert message in str(error.value)


@pytest.mark.parametrize("length", [0, "7"])
def test_a_wrong_limit_is_named(length: Any, tmp_path: Path) -> None:
    path = library(tmp_path / "model", limit=7) / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["truncation"]["max_length"] = length
    path.write_text(json.dumps(stored))
    with pytest.raises(ModelError, match="max_length must be a positive int"):
        engine.load_model(str(path.parent))
