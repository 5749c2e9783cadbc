"""The CUDA encoder's heads on the host's side: what the extension is told, and how its outputs are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from embert import engine
from embert.engine.batch import PackedBatch
from embert.engine.encoders.cuda.encoder import CudaEncoder
from embert.engine.encoders.cuda.heads import without_padding
from embert.engine.errors import EncoderError
from embert.engine.heads.description import (
    Classifier,
    Expansion,
    Heads,
    Layer,
    MultiVector,
    Norm,
    Role,
    Splade,
    TokenPooling,
    TokenWeights,
)
from embert.engine.heads.late_interaction import NO_VECTORS, max_sim, pool
from embert.engine.memory_estimate import estimate_memory
from embert.engine.model import Model
from embert.engine.tasks import Task
from tests.engine.conftest import BuildBert, Install
from tests.engine.stand_in_gpu import StandInEncoder
from tests.engine.test_decisions import QWEN_TEMPLATE, language_model
from tests.engine.test_decoders import qwen
from tests.oracles.model_cases import write_modules

HIDDEN = 64
LENGTHS = [3, 1, 5, 2]
MIXED = [Task.EMBED | Task.SPARSE, Task.TOKENS, Task.CLASSIFY | Task.MULTI | Task.SPARSE, Task.EMBED | Task.MULTI]
DENSE = Layer("classifier.dense", "", HIDDEN, HIDDEN, True, "tanh")
OUT = Layer("classifier.out_proj", "", HIDDEN, 2, False, "identity")
COLBERT = Layer("colbert", "", HIDDEN, 16, False, "identity")
HEADS = Heads(
    Classifier((DENSE, OUT), ("no", "yes"), "softmax"),
    TokenWeights(Layer("sparse", "", HIDDEN, 1, True, "relu"), ()),
    MultiVector((COLBERT,)),
)


@pytest.fixture
def model(build_bert: BuildBert) -> Model:
    """A model with every head; its Dense module is 64 to 20."""
    folder = build_bert(pooling=None)
    write_modules(folder, dense=[(HIDDEN, 20, "torch.nn.modules.activation.Tanh")])
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for layer in (DENSE, OUT, COLBERT, HEADS.sparse.layer if isinstance(HEADS.sparse, TokenWeights) else OUT):
        weights[f"{layer.name}.weight"] = torch.randn(layer.outputs, layer.inputs, generator=generator)
        if layer.bias:
            weights[f"{layer.name}.bias"] = torch.randn(layer.outputs, generator=generator)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return dataclasses.replace(engine.load_model(str(folder)), heads=HEADS)


Make = Callable[..., tuple[CudaEncoder, StandInEncoder]]


@pytest.fixture
def make(install: Install) -> Make:
    """An encoder before a stand-in for the extension."""

    def made(model: Model, **options: Any) -> tuple[CudaEncoder, StandInEncoder]:
        gpu = install(model)
        return CudaEncoder(model, **options), gpu.encoders[0]

    return made


def batch(tasks: list[Task] | None = None) -> PackedBatch:
    ids = np.random.default_rng(0).integers(5, 30, sum(LENGTHS)).astype(np.int32)
    cu_seqlens = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)
    return PackedBatch(ids, cu_seqlens, tasks=None if tasks is None else np.array(tasks, np.uint8))


def test_each_sequence_gets_the_tasks_that_it_wants(model: Model, make: Make) -> None:
    encoder, gpu = make(model)
    mixed = batch(MIXED)
    outputs = encoder.wait(encoder.submit(mixed))
    assert gpu.batches[-1][6].tolist() == [9, 2, 28, 17]
    assert set(outputs) == {task for task in Task if task < Task.TOKEN_CLASSES}
    assert {task: rows.offsets.tolist() for task, rows in outputs.items() if task != Task.SPARSE} == {
        Task.EMBED: [0, 1, 2], Task.TOKENS: [0, 1], Task.CLASSIFY: [0, 1], Task.MULTI: [0, 5, 7],
    }  # fmt: skip
    assert {task: rows.values.shape[1] for task, rows in outputs.items()} == {
        Task.EMBED: 20, Task.TOKENS: HIDDEN, Task.CLASSIFY: 2, Task.SPARSE: 1, Task.MULTI: 16,
    }  # fmt: skip
    for task, rows in outputs.items():  # as each task of the same sequences alone
        alone = encoder.wait(encoder.submit(batch([task] * len(LENGTHS))))[task]
        for place, sequence in enumerate(mixed.sequences_of(task)):
            got, wanted = rows.slice(place, place + 1), alone.slice(sequence, sequence + 1)
            np.testing.assert_array_equal(got.values, wanted.values)
            if task == Task.SPARSE:
                np.testing.assert_array_equal(got.indices, wanted.indices)


def test_tasks_that_a_model_does_not_have_are_refused(model: Model, make: Make) -> None:
    encoder, _ = make(dataclasses.replace(model, heads=Heads(HEADS.classifier), embeds=False))
    assert encoder.encode(batch(), Task.CLASSIFY).shape == (4, 2)
    with pytest.raises(EncoderError, match=r"this model's tasks are .*CLASSIFY.*; the batch wants .*EMBED"):
        encoder.submit(batch())
    with pytest.raises(EncoderError, match=r"sequence 1 wants .*MULTI"):
        encoder.submit(batch([Task.CLASSIFY, Task.MULTI, Task.CLASSIFY, Task.CLASSIFY]))


TRANSFORM = Layer("cls.predictions.transform.dense", "", HIDDEN, HIDDEN, True, "gelu")
NORM = "cls.predictions.transform.LayerNorm"
SPLADE = Splade(TRANSFORM, Norm(NORM, 1e-12), "", "cls.predictions.bias")


def with_splade(model: Model, head: Splade) -> Model:
    """The model with a SPLADE head, and its weights drawn."""
    path, vocabulary = model.folder / "model.safetensors", model.config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        f"{TRANSFORM.name}.weight": (HIDDEN, HIDDEN), f"{TRANSFORM.name}.bias": (HIDDEN,),
        f"{NORM}.weight": (HIDDEN,), f"{NORM}.bias": (HIDDEN,), head.bias: (vocabulary,),
    }  # fmt: skip
    if head.decoder:
        shapes[head.decoder] = (vocabulary, HIDDEN)
    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file({**load_file(path), **drawn}, path, {"format": "pt"})
    return dataclasses.replace(model, heads=Heads(sparse=head))


@pytest.mark.parametrize("tied", [True, False])
def test_splades_pairs_are_the_cpu_encoders(model: Model, make: Make, tied: bool) -> None:
    head = dataclasses.replace(SPLADE, decoder="" if tied else "cls.predictions.decoder.weight", twice=not tied)
    splade = with_splade(model, head)
    some = batch([Task.SPARSE, Task.EMBED, Task.SPARSE, Task.SPARSE])
    found, expected = (
        each.wait(each.submit(some))[Task.SPARSE]
        for each in (make(splade)[0], engine.load_encoder(splade, device="cpu"))
    )
    np.testing.assert_array_equal(found.offsets, expected.offsets)
    np.testing.assert_array_equal(found.indices, expected.indices)
    np.testing.assert_allclose(found.values, expected.values, atol=1e-4)


PADDING = 9


@pytest.mark.parametrize("tied", [True, False])
def test_label_mass_is_of_the_word_table_or_of_the_models_own_matrix(tmp_path: Path, make: Make, tied: bool) -> None:
    folder = language_model(tmp_path, "qwen3", qwen, QWEN_TEMPLATE, tie_word_embeddings=tied)
    model = engine.load_model(str(folder))
    encoder, gpu = make(model)
    cpu = engine.load_encoder(model, device="cpu")
    some = batch([Task.DECIDE, Task.DECIDE | Task.LABEL_MASS, Task.LABEL_MASS, Task.DECIDE])
    found, expected = (each.wait(each.submit(some)) for each in (encoder, cpu))
    assert found.keys() == expected.keys()
    for task, rows in expected.items():
        np.testing.assert_allclose(found[task].values, rows.values, atol=1e-4)
    assert (("vocabulary.weight", -1) in gpu.loaded) is not tied
    without = dataclasses.replace(model, heads=Heads())
    with_head, layers = (estimate_memory(each, device="cuda").weights for each in (model, without))
    assert with_head - layers == (0 if tied else 2 * model.config.vocab_size * model.config.hidden_size)


def test_padding_at_the_end_of_a_classified_text_is_not_run() -> None:
    """A causal model's rows do not depend on it. A text of nothing else keeps its first token."""
    texts = [[1, 9, 2, 9, 9], [9, 9], [3, 9], [4]]
    tasks = np.array([Task.CLASSIFY, Task.CLASSIFY, Task.EMBED, Task.CLASSIFY], np.uint8)
    batch = dataclasses.replace(engine.pack([np.array(text, np.int32) for text in texts]), tasks=tasks)
    trimmed = without_padding(batch, PADDING)
    assert trimmed.ids.tolist() == [1, 9, 2, 9, 3, 9, 4]
    assert trimmed.cu_seqlens.tolist() == [0, 3, 4, 6, 7]
    assert without_padding(trimmed.take(np.array([0, 2, 3])), PADDING).ids.tolist() == [1, 9, 2, 3, 9, 4]


def test_tokens_that_queries_do_not_attend_to(model: Model, make: Make) -> None:
    head = MultiVector((COLBERT,), query=Role(expansion=Expansion(9, 32, attended=False)))
    encoder, gpu = make(dataclasses.replace(model, heads=Heads(multi_vector=head), embeds=False, after_pooling=()))
    batch = engine.pack([np.array(ids, np.int32) for ids in ([5, 6, 9, 9], [9, 9], [5, 9, 6])])
    encoder.wait(encoder.submit(batch.with_tasks(Task.MULTI)))
    assert gpu.attended.tolist() == [2, 2, 3]
    scored = batch.with_tasks(Task.CLASSIFY).with_queries(np.array([True, False, False]))
    encoder.wait(encoder.submit(scored))
    assert gpu.attended.tolist() == [2, 2, 3]
    encoder.wait(encoder.submit(batch.take(np.array([1, 2])).with_tasks(Task.MULTI)))
    assert gpu.attended is None


@pytest.mark.parametrize("pooling", [None, TokenPooling(2, 0, True)])
@pytest.mark.parametrize("mean", [False, True])
def test_scores_of_documents_with_the_last_query_before_them(
    model: Model, make: Make, pooling: TokenPooling | None, mean: bool
) -> None:
    """On the device, or from its vectors on the host; texts that request vectors may be between them."""
    head = MultiVector((COLBERT,), document=Role(skipped=(7,), pooling=pooling), mean_of_query=mean)
    late = dataclasses.replace(model, heads=Heads(multi_vector=head), embeds=False, after_pooling=())
    encoder, gpu = make(late)
    random = np.random.default_rng(0)
    lengths, is_query = [40, 5, 9, 3, 33, 6, 4], np.array([1, 0, 0, 1, 0, 0, 0], np.bool_)
    ids = [random.integers(5, 30, length).astype(np.int32) for length in lengths]
    ids[-1][:] = 7
    tasks = np.array([4, 4, 16, 4, 4, 4, 4], np.uint8)
    batch = dataclasses.replace(engine.pack(ids), tasks=tasks).with_queries(is_query)
    outputs = encoder.wait(encoder.submit(batch))
    vectors = encoder.wait(encoder.submit(engine.pack(ids).with_tasks(Task.MULTI)))[Task.MULTI]
    np.testing.assert_array_equal(outputs[Task.MULTI].values, vectors.slice(2, 3).values)
    expected = []
    for query, document in ((0, 1), (3, 4), (3, 5), (3, 6)):
        own = pool(vectors.slice(document, document + 1).values[ids[document] != 7], head.document)
        expected.append(max_sim(vectors.slice(query, query + 1).values, own, head))
    np.testing.assert_allclose(outputs[Task.CLASSIFY].values[:, 0], expected, rtol=1e-5)
    assert expected[-1] == NO_VECTORS
    assert (Task.CLASSIFY in gpu.batches[-2][-1]) == (pooling is None)
    with pytest.raises(EncoderError, match="sequence 1 has no query"):
        encoder.submit(dataclasses.replace(batch, is_query=np.zeros(len(ids), np.bool_)))
