"""Poolings, and modules after pooling, compared with sentence-transformers: on the CPU, and on the host after a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from embert import engine
from embert.engine.batch import PackedBatch, TaskOutput
from embert.engine.encoders.cuda.encoder import CudaEncoder
from embert.engine.errors import EncoderError
from embert.engine.tasks import Task
from tests.engine.conftest import Install, small_tokenizer
from tests.oracles.model_cases import build

HIDDEN = 64
TEXTS = ["a cat", "b", "the longest of these texts, by far", "dogs 42"]
PROMPT = "query: "


Save = Callable[..., tuple[Any, Path]]


@pytest.fixture(scope="module")
def library() -> SimpleNamespace:
    """sentence-transformers' modules."""
    from sentence_transformers import SentenceTransformer, base, sentence_transformer

    kinds = {**vars(base.modules), **vars(sentence_transformer.modules)}
    return SimpleNamespace(SentenceTransformer=SentenceTransformer, **kinds)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BERT as transformers stores it."""
    folder = build(tmp_path_factory.mktemp("bert"), "bert", modules=False)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=small_tokenizer(64), model_max_length=64, **special
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def save(source: Path, tmp_path: Path, library: SimpleNamespace) -> Save:
    """Saves a model of these modules as sentence-transformers does, which is the oracle too."""

    def saved(*after: torch.nn.Module, pooling: Any = "mean", include_prompt: bool = True) -> tuple[Any, Path]:
        folder = tmp_path / "saved"
        torch.manual_seed(1)
        for module in after:
            for weight in module.parameters():
                torch.nn.init.normal_(weight, mean=0.3, std=0.4)
        parts = [library.Transformer(str(source)), library.Pooling(HIDDEN, pooling, include_prompt=include_prompt)]
        prompts = {"query": PROMPT, "document": ""}
        made = library.SentenceTransformer(modules=[*parts, *after], device="cpu", prompts=prompts)
        made.save_pretrained(str(folder))
        return made.eval(), folder

    return saved


def dense(of: SimpleNamespace, inputs: int, outputs: int, activation: str = "Identity", **more: Any) -> torch.nn.Module:
    module: torch.nn.Module = of.Dense(inputs, outputs, activation_function=getattr(torch.nn, activation)(), **more)
    return module


# Modules after pooling, and the pooling.
CASES: dict[str, tuple[Callable[[SimpleNamespace], tuple[torch.nn.Module, ...]], Any]] = {
    "weightedmean, max": (lambda of: (), ("weightedmean", "max")),
    "all, not in the order of flags": (
        lambda of: (),
        ("lasttoken", "weightedmean", "mean_sqrt_len_tokens", "mean", "max", "cls"),
    ),
    "cls twice": (lambda of: (dense(of, 2 * HIDDEN, 10, "Tanh"),), ("cls", "cls")),
    "Normalize, Dense, Dropout, LayerNorm, Normalize": (
        lambda of: (of.Normalize(), dense(of, HIDDEN, 24, "GELU"), of.Dropout(0.5), of.LayerNorm(24), of.Normalize()),
        "mean",
    ),
    "Dense, Normalize, Dense": (lambda of: (dense(of, HIDDEN, 24), of.Normalize(), dense(of, 24, 8, "ReLU")), "cls"),
    "a residual": (lambda of: (dense(of, HIDDEN, HIDDEN, "SiLU", use_residual=True),), "max"),
    "a projected residual": (lambda of: (dense(of, HIDDEN, 20, "GELU", use_residual=True),), "lasttoken"),
    "LayerNorm, and a Dense without a bias": (
        lambda of: (of.LayerNorm(HIDDEN), dense(of, HIDDEN, 12, "Sigmoid", bias=False)), "mean_sqrt_len_tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_sentence_transformers(save: Save, library: SimpleNamespace, install: Install, case: str) -> None:
    after, pooling = CASES[case]
    oracle, folder = save(*after(library), pooling=pooling)
    model = engine.load_model(str(folder))
    install(model)
    tokenizer = engine.Tokenizer(model)
    for encoder in (engine.load_encoder(model, device="cpu"), CudaEncoder(model, dtype="float32")):
        loaded = engine.Engine(model, tokenizer, encoder)
        for normalize in {True, model.normalize}:
            wanted = oracle.encode(TEXTS, normalize_embeddings=normalize)
            vectors = loaded.embed(TEXTS, normalize=normalize)
            assert vectors.shape == wanted.shape == (len(TEXTS), model.width)
            np.testing.assert_allclose(vectors, wanted, rtol=1e-4, atol=1e-5)
        cut = oracle.encode(TEXTS, normalize_embeddings=True, truncate_dim=5)
        np.testing.assert_allclose(loaded.embed(TEXTS, dimensions=5), cut, rtol=1e-4, atol=1e-5)
        assert loaded.embed([]).shape == (0, model.width)
        if encoder.name == "cuda":
            assert "computed on the host, after the GPU: " in encoder.choice


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "lasttoken", ("weightedmean", "mean_sqrt_len_tokens")])
def test_prompts_that_are_not_pooled(save: Save, install: Install, pooling: Any) -> None:
    oracle, folder = save(pooling=pooling, include_prompt=False)
    model = engine.load_model(str(folder))
    install(model)
    tokenizer = engine.Tokenizer(model)
    for encoder in (engine.load_encoder(model, device="cpu"), CudaEncoder(model, dtype="float32")):
        loaded = engine.Engine(model, tokenizer, encoder)
        for name in ("query", "document"):  # an empty prompt has no tokens
            texts = [*TEXTS, "x" * 100, ""]
            wanted = oracle.encode(texts, prompt_name=name, normalize_embeddings=True)
            if pooling == "max":  # theirs is not a number where nothing is left
                texts, wanted = texts[:-1], wanted[:-1]
            np.testing.assert_allclose(loaded.embed(texts, prompt_name=name), wanted, rtol=1e-4, atol=1e-5)
        known = tokenizer.encode_known(TEXTS, prompt=PROMPT)
        assert known is not None
        assert known.prompt_tokens == 3  # [CLS], a word and a colon that are not in the vocabulary


def test_tasks_share_a_batch_on_the_host(save: Save, library: SimpleNamespace, install: Install) -> None:
    _, folder = save(dense(library, 2 * HIDDEN, 20), pooling=("weightedmean", "cls"))
    model = engine.load_model(str(folder))
    install(model)
    on_gpu, on_cpu = CudaEncoder(model, dtype="float32"), engine.load_encoder(model, device="cpu")
    ids = np.random.default_rng(0).integers(5, 30, 11).astype(np.int32)
    tasks = np.array([Task.EMBED, Task.TOKENS, Task.EMBED | Task.TOKENS, Task.EMBED], np.uint8)
    mixed = PackedBatch(
        ids,
        np.array([0, 3, 4, 9, 11], np.int32),
        tasks=tasks,
        dimensions=np.array([0, 0, 7, 0], np.int32),
        normalize=np.array([True, True, False, True]),
    )
    ticket = on_gpu.submit(mixed)
    tasks[:] = 0  # as soon as it is submitted, its arrays may be used again
    mixed.dimensions[:] = 3  # type: ignore[index]
    outputs = on_gpu.wait(ticket)
    tasks[:] = [1, 2, 3, 1]
    mixed.dimensions[:] = [0, 0, 7, 0]  # type: ignore[index]
    wanted: dict[Task, TaskOutput] = on_cpu.wait(on_cpu.submit(mixed))
    assert set(outputs) == set(wanted) == {Task.EMBED, Task.TOKENS}
    for task, rows in wanted.items():
        assert outputs[task].offsets.tolist() == rows.offsets.tolist()
        np.testing.assert_allclose(outputs[task].values, rows.values, rtol=1e-4, atol=1e-5)
    with pytest.raises(EncoderError, match=r"dimensions of sequence 0 must be 0 to 20, found 21"):
        on_gpu.submit(PackedBatch(ids[:3], np.array([0, 3], np.int32), dimensions=np.array([21], np.int32)))
    alone = on_gpu.encode(PackedBatch(ids[:3], np.array([0, 3], np.int32)))
    np.testing.assert_array_equal(alone[0], outputs[Task.EMBED].values[0])  # the same bits whatever it is batched with
