"""Adapters on a GPU, with a stand-in for the extension that computes with the weights it was given.

Batches are cut by adapter and put together again, and every encoder of the extension has an adapter's weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from embert import engine
from embert.engine import Task
from embert.engine.adapters import MERGED_ELEMENTS, LowRank
from embert.engine.checkpoint import Checkpoint
from embert.engine.encoders import cuda
from embert.engine.encoders.cuda import CudaEncoder
from embert.engine.encoders.cuda.adapters import parts_of
from embert.engine.encoders.cuda_shapes import refusal
from embert.engine.encoders.devices import devices
from embert.engine.errors import BrokenModel, EncoderError, EncoderLost, UnsupportedModel
from embert.engine.files.safetensors_file import Tensor
from embert.engine.footprint import footprint
from embert.engine.heads.description import Heads, Layer, Norm, Splade
from embert.engine.model import Model
from embert.engine.packing import PackedBatch, cumulative
from tests.engine.conftest import random_sequences, unit
from tests.engine.jina import RANK, TASKS, VOCABULARY, Jina, flash, peft
from tests.engine.stand_in_gpu import Lost, Refused, StandInEncoder, StandInGpu

LENGTHS = [1, 2, 15, 64, 3, 127, 128, 40, 40, 7, 1, 90]
ADAPTERS = np.array([0, 1, 2, 3, 4, -1, 2, 0, 4, -1, 3, 1], np.int8)
TOKENS = sum(LENGTHS)

Make = Callable[..., tuple[CudaEncoder, StandInGpu]]


@pytest.fixture(scope="module")
def jina(tmp_path_factory: pytest.TempPathFactory) -> Jina:
    return flash(tmp_path_factory.mktemp("jina"))


@pytest.fixture(scope="module")
def model(jina: Jina) -> Model:
    return engine.load_model(str(jina.folder))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """An encoder on a stand-in for the extension."""

    def made(model: Model, *, gpu: dict[str, Any] | None = None, **options: Any) -> tuple[CudaEncoder, StandInGpu]:
        stand_in = StandInGpu(model, **(gpu or {}))
        monkeypatch.setattr(cuda, "_extension", lambda: stand_in)
        encoder = CudaEncoder(model, **{"max_batch_tokens": TOKENS, **options})
        for each in stand_in.encoders:
            each.batches.clear()  # of the known text
        return encoder, stand_in

    return made


def packed(lengths: list[int] = LENGTHS, adapters: Any = ADAPTERS, **more: Any) -> PackedBatch:
    sequences = random_sequences(lengths, VOCABULARY)
    return engine.pack(sequences, adapters=None if adapters is None else np.array(adapters, np.int8), **more)


def lengths_run(gpu: StandInGpu) -> list[list[list[int]]]:
    """The lengths of the sequences of each batch that each encoder was given."""
    return [[np.diff(cu_seqlens).tolist() for _, cu_seqlens, *_ in each.batches] for each in gpu.encoders]


def expected(jina: Jina, batch: PackedBatch, adapters: Any = ADAPTERS) -> list[npt.NDArray[np.float64]]:
    """The oracle's hidden states of each sequence; `adapters` are numbers in its own order."""
    split = batch.cu_seqlens[1:-1]
    types = np.split(np.zeros_like(batch.ids) if batch.token_types is None else batch.token_types, split)
    texts = zip(np.split(batch.ids, split), adapters, types, strict=True)
    return [jina.hidden(ids, TASKS[number] if number >= 0 else None, kinds) for ids, number, kinds in texts]


@pytest.mark.parametrize(
    "form",
    [flash, peft, lambda folder: peft(folder, without=("k_proj", "fc2", "token_type_embeddings"))],
    ids=["jina's", "transformers'", "transformers', not all modules"],
)
def test_sequences_of_different_adapters_in_one_batch(tmp_path: Path, make: Make, form: Callable[[Path], Jina]) -> None:
    jina = form(tmp_path)
    model = engine.load_model(str(tmp_path))
    encoder, gpu = make(model)
    adapters = model.architecture.adapters
    assert adapters is not None
    numbers = [adapters.number(TASKS[number] if number >= 0 else None) for number in ADAPTERS]
    batch = packed(adapters=numbers, token_types=[np.arange(n, dtype=np.int32) % 2 for n in LENGTHS])
    wanted = expected(jina, batch)
    np.testing.assert_allclose(encoder.encode(batch, Task.TOKENS), np.concatenate(wanted), atol=2e-4)
    vectors = encoder.encode(batch)
    np.testing.assert_allclose(unit(vectors), unit(np.stack([rows.mean(0) for rows in wanted])), atol=1e-5)
    assert lengths_run(gpu) == [
        [[LENGTHS[i] for i in np.flatnonzero(np.array(numbers) == adapter)]] * 2 for adapter in range(-1, 5)
    ]
    for i in range(len(LENGTHS)):
        np.testing.assert_allclose(encoder.encode(batch.taken(np.array([i])))[0], vectors[i], atol=1e-5)


def test_a_batch_of_one_adapter_is_not_cut(model: Model, make: Make, jina: Jina) -> None:
    encoder, gpu = make(model)
    for adapter in (-1, 3, None):
        numbers = None if adapter is None else [adapter] * len(LENGTHS)
        batch = packed(adapters=numbers)
        oracle = expected(jina, batch, [-1 if adapter is None else adapter] * len(LENGTHS))
        np.testing.assert_allclose(encoder.encode(batch, Task.TOKENS), np.concatenate(oracle), atol=2e-4)
    assert lengths_run(gpu) == [[LENGTHS] * 2, [], [], [], [LENGTHS], []]


def test_what_each_sequence_wants_stays_with_it(model: Model, make: Make, jina: Jina) -> None:
    """Tasks, dimensions and normalising of single sequences, of which some parts have none that wants a task."""
    encoder, _ = make(model)
    tasks = [Task.EMBED if number in (0, 4) else Task.TOKENS if number == 1 else Task.EMBED | Task.TOKENS
             for number in ADAPTERS]  # fmt: skip
    dimensions, normalize = np.arange(len(LENGTHS), dtype=np.int32) * 4, np.arange(len(LENGTHS)) % 3 > 0
    batch = packed(tasks=np.array(tasks, np.uint8), dimensions=dimensions, normalize=normalize)
    answers = encoder.wait(encoder.submit(batch))
    wanted = expected(jina, batch)
    assert [*answers] == [Task.EMBED, Task.TOKENS]
    embedding = [i for i, task in enumerate(tasks) if Task.EMBED in task]
    np.testing.assert_allclose(
        answers[Task.EMBED].values, np.stack([wanted[i].mean(0) for i in embedding]), atol=1e-4
    )  # the stand-in neither cuts nor normalises
    for_tokens = [i for i, task in enumerate(tasks) if Task.TOKENS in task]
    np.testing.assert_allclose(answers[Task.TOKENS].values, np.concatenate([wanted[i] for i in for_tokens]), atol=2e-4)
    assert answers[Task.TOKENS].counts.tolist() == [LENGTHS[i] for i in for_tokens]


def test_dimensions_and_normalising_go_to_the_extension_by_part(model: Model, make: Make) -> None:
    encoder, gpu = make(model)
    dimensions, normalize = np.arange(len(LENGTHS), dtype=np.int32) * 4, np.arange(len(LENGTHS)) % 3 > 0
    encoder.encode(packed(dimensions=dimensions, normalize=normalize))
    for adapter, each in enumerate(gpu.encoders, start=-1):
        ((_, _, _, _, dims, norm, _),) = each.batches
        np.testing.assert_array_equal(dims, dimensions[adapter == ADAPTERS])
        np.testing.assert_array_equal(norm, normalize[adapter == ADAPTERS])


def test_two_full_batches_in_flight_and_no_third(model: Model, make: Make) -> None:
    """A third leaves nothing behind in the encoders that had room for a part of it."""
    encoder, gpu = make(model)
    first, second = packed(), packed(LENGTHS[::-1], np.roll(ADAPTERS, 5))
    assert first.tokens == second.tokens == encoder.max_batch_tokens
    alone = [encoder.encode(each) for each in (first, second)]
    tickets = [encoder.submit(each) for each in (first, second)]
    assert [len(each._answers) for each in gpu.encoders] == [2] * 6
    for third in (packed(), packed([3], [2]), packed([3, 3], [4, -1])):
        with pytest.raises(EncoderError, match="two batches are in flight already"):
            encoder.submit(third)
    for ticket, wanted in zip(tickets, alone, strict=True):
        np.testing.assert_array_equal(encoder.wait(ticket)[Task.EMBED].values, wanted)
    with pytest.raises(EncoderError, match="not in flight"):
        encoder.wait(tickets[0])
    few = encoder.submit(packed([3, 4], [0, 1])), encoder.submit(packed([5, 6], [1, 2]))
    with pytest.raises(EncoderError, match="two batches are in flight already"):
        encoder.submit(packed([3, 4, 5], [0, 1, 2]))  # the first and the third encoder have room
    assert [len(each._answers) for each in gpu.encoders] == [0, 1, 2, 1, 0, 0]
    for ticket in few:
        encoder.wait(ticket)
    assert encoder.encode(packed()).shape == (12, 64)


@pytest.mark.parametrize(("failure", "error"), [(Refused, EncoderError), (Lost, EncoderLost)])
def test_a_part_that_cannot_be_submitted(
    model: Model, make: Make, failure: type[Exception], error: type[EncoderError]
) -> None:
    encoder, gpu = make(model)
    wanted = encoder.encode(packed())
    gpu.encoders[3].fails.append(failure("out of memory"))
    with pytest.raises(EncoderError, match=r"^cuda:0 \(A GPU\): out of memory$") as caught:
        encoder.submit(packed())
    assert type(caught.value) is error
    assert not any(each._answers for each in gpu.encoders)
    np.testing.assert_array_equal(encoder.encode(packed()), wanted)


@pytest.mark.parametrize(
    ("failures", "error"),
    [({1: Refused("a")}, EncoderError), ({1: Refused("a"), 4: Lost("b")}, EncoderLost), ({0: Lost("b")}, EncoderLost)],
)
def test_parts_that_fail_while_they_are_waited_for(
    model: Model, make: Make, failures: dict[int, Exception], error: type[EncoderError]
) -> None:
    """The other parts are taken all the same, and a lost encoder is worse than a failed forward."""
    encoder, gpu = make(model)
    wanted = encoder.encode(packed())
    ticket = encoder.submit(packed())
    wait = StandInEncoder.wait

    def failing(self: StandInEncoder, ticket: int) -> Any:
        answers = wait(self, ticket)
        if (failure := failures.get(gpu.encoders.index(self))) is not None:
            raise failure
        return answers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandInEncoder, "wait", failing)
        with pytest.raises(EncoderError, match=r"cuda:0 \(A GPU\): [ab]") as caught:
            encoder.wait(ticket)
    assert type(caught.value) is error
    assert not any(each._answers for each in gpu.encoders)
    np.testing.assert_array_equal(encoder.encode(packed()), wanted)


def test_adapters_that_a_model_does_not_have(model: Model, make: Make) -> None:
    encoder, gpu = make(model)
    with pytest.raises(EncoderError, match="the adapter of sequence 1 must be -1 to 4, found 5"):
        encoder.submit(packed([2, 2], [0, 5]))
    with pytest.raises(EncoderError, match="adapters must have one element a sequence, found 3"):
        encoder.submit(packed([2, 2], [0, 1, 1]))
    assert lengths_run(gpu) == [[]] * 6
    encoder.close()
    with pytest.raises(EncoderError, match="the encoder is closed"):
        encoder.submit(packed([2, 2], [0, 1]))


def random_batches() -> Iterator[PackedBatch]:
    random = np.random.default_rng(3)
    for _ in range(200):
        count = int(random.integers(1, 20))
        lengths = random.integers(1, 9, count).astype(np.int32)
        ids = np.arange(lengths.sum(), dtype=np.int32)
        yield PackedBatch(
            ids, cumulative(lengths), ids * 3, tasks=random.integers(1, 32, count).astype(np.uint8),
            adapters=random.integers(-1, random.integers(0, 6), count).astype(np.int8),
        )  # fmt: skip


def test_parts_have_each_sequence_once() -> None:
    for batch in random_batches():
        assert batch.adapters is not None
        assert batch.tasks is not None
        parts = parts_of(batch)
        assert sorted({*batch.adapters.tolist()}) == [part.adapter for part in parts]
        seen = []
        for part in parts:
            numbers = np.arange(batch.sequences) if part.sequences is None else part.sequences
            assert (batch.adapters[numbers] == part.adapter).all()
            assert part.batch.tokens == len(part.batch.ids) <= batch.tokens
            for row, number in enumerate(numbers):
                of_part = slice(part.batch.cu_seqlens[row], part.batch.cu_seqlens[row + 1])
                of_batch = slice(batch.cu_seqlens[number], batch.cu_seqlens[number + 1])
                np.testing.assert_array_equal(part.batch.ids[of_part], batch.ids[of_batch])
                np.testing.assert_array_equal(part.batch.token_types[of_part], batch.ids[of_batch] * 3)  # type: ignore[index]
            for task in Task:
                np.testing.assert_array_equal(
                    part.wanting(task), [number for number in numbers if task in Task(int(batch.tasks[number]))]
                )
            seen += numbers.tolist()
        assert sorted(seen) == [*range(batch.sequences)]


@pytest.mark.parametrize("cu_seqlens", [[0, 2, 9], [1, 2, 4], [0, 4, 4], [0, 5, 4]])
def test_a_batch_that_makes_no_sense_is_left_whole(cu_seqlens: list[int]) -> None:
    """So that the extension says what is wrong with it."""
    batch = PackedBatch(np.zeros(4, np.int32), np.array(cu_seqlens, np.int32), adapters=np.array([0, 1], np.int8))
    (part,) = parts_of(batch)
    assert part.batch is batch


def test_each_adapter_has_an_encoder_with_a_known_text(model: Model, make: Make) -> None:
    """One with the weights of the adapter before it, or of none, does not start."""
    _, gpu = make(model)
    assert len(gpu.encoders) == 6
    load = StandInEncoder.load
    given: dict[tuple[int, str, int], Any] = {}
    wrong = 0

    def swapped(self: StandInEncoder, name: str, layer: int, data: Any, shape: Any, dtype: str) -> None:
        number = self.gpu.encoders.index(self)
        given[number, name, layer] = data
        if number == wrong and name in ("word", "query.weight", "inner.weight"):
            data = given[number - 1, name, layer]
        load(self, name, layer, data, shape, dtype)

    for wrong in (1, 2, 5):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StandInEncoder, "load", swapped)
            with pytest.raises(UnsupportedModel, match=f"float16: with the adapter {TASKS[wrong - 1]} a known text"):
                make(model)


def test_weights_without_an_adapter_are_as_they_are_stored(tmp_path: Path, make: Make) -> None:
    """In 16 bits they are then not rounded again. Those with one are added up in float32."""
    flash(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(path).items()}, path)
    model = engine.load_model(str(tmp_path))
    _, gpu = make(model)
    checkpoint = Checkpoint.open(model)
    for (name, layer), ours in (
        (("word", -1), "embeddings.word_embeddings.weight"),
        (("value.weight", 1), "encoder.layer.1.attention.self.value.weight"),
    ):
        stored, low_rank = checkpoint.stored(ours), checkpoint.low_rank(ours)
        assert low_rank is not None
        assert gpu.encoders[0].loaded[name, layer].dtype == np.float16
        np.testing.assert_array_equal(gpu.encoders[0].loaded[name, layer], stored.array)
        for number in range(5):
            given = gpu.encoders[1 + number].loaded[name, layer]
            assert given.dtype == np.float32
            added = 1.5 * low_rank.left[number].astype(np.float64) @ low_rank.right[number]
            np.testing.assert_allclose(given, stored.array + added, rtol=1e-5, atol=1e-6)
    assert all(each.loaded["out.bias", 0].dtype == np.float16 for each in gpu.encoders)  # adapters add nothing to it


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_weights_are_added_up_in_blocks(dtype: str) -> None:
    random = np.random.default_rng(0)
    rows = 2 * MERGED_ELEMENTS // 8 + 17
    values = random.standard_normal((rows, 8)).astype(np.float32)
    stored: npt.NDArray[Any] = values.astype(np.float16 if dtype == "F16" else np.float32)
    if dtype == "BF16":
        stored = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    low_rank = LowRank(
        random.standard_normal((2, rows, 3)).astype(np.float32), random.standard_normal((2, 3, 8)).astype(np.float32)
    )
    weight = Tensor(stored, dtype)
    before = stored.copy()
    merged = low_rank.added_to(weight, 1, 0.5)
    exact = weight.float32().astype(np.float64) + 0.5 * low_rank.left[1].astype(np.float64) @ low_rank.right[1]
    assert merged.dtype == "F32"
    np.testing.assert_allclose(merged.float32(), exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(stored, before)


def change(folder: Path, number: int, factor: float) -> Model:
    """The model whose adapter of that number adds `factor` times as much to the first layer's inner weight."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    stored["roberta.encoder.layers.0.mlp.fc1.parametrizations.weight.0.lora_B"][number] *= factor
    save_file(stored, path)
    return engine.load_model(str(folder))


def test_an_adapter_whose_weights_float16_does_not_hold(tmp_path: Path, make: Make) -> None:
    flash(tmp_path)
    model = change(tmp_path, 3, 1e6)
    encoder, gpu = make(model)
    reason = f"inner.weight of layer 0 with the adapter {TASKS[3]} has an element of"
    assert encoder.dtype == "bfloat16"
    assert f"; bfloat16 because in float16 {reason}" in encoder.choice
    assert [each.shape["dtype"] for each in gpu.encoders] == ["float16"] * 5 + ["bfloat16"] * 6
    assert encoder._encoders == gpu.encoders[5:]
    with pytest.raises(UnsupportedModel, match=f"in float16: {reason} .*, and float16 ends at 65504"):
        make(model, dtype="float16")
    assert make(model, dtype="float32")[0].dtype == "float32"


def test_an_adapter_that_is_not_finite(tmp_path: Path, make: Make) -> None:
    flash(tmp_path)
    model = change(tmp_path, 4, float("nan"))
    with pytest.raises(BrokenModel, match=f"inner.weight of layer 0 with the adapter {TASKS[4]} has elements that are"):
        make(model)


def test_an_adapter_that_does_not_let_norms_be_folded(
    model: Model, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its own encoder is made anew."""
    start = StandInEncoder.start

    def refused(self: StandInEncoder) -> str:
        self.folds = self.shape["fold"]
        if self.gpu.encoders.index(self) == 2 and self.folds:
            return "a row is not finite"
        return start(self)

    monkeypatch.setattr(StandInEncoder, "start", refused)
    encoder, gpu = make(model)
    assert [each.shape["fold"] for each in gpu.encoders] == [True, True, True, False, True, True, True]
    assert encoder._encoders == [each for i, each in enumerate(gpu.encoders) if i != 2]
    assert encoder.layernorm == "partly folded"
    assert encoder.choice == "hopper matrix products, LayerNorm partly folded (a row is not finite)"


def test_memory_is_that_of_all_encoders(model: Model, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, gpu = make(model)
    for number, each in enumerate(gpu.encoders):
        monkeypatch.setattr(each, "memory", (100 + number, 10, 2000 - number))
    assert encoder.memory == (615, 60, 2000)


def test_memory_that_is_planned(model: Model) -> None:
    architecture = dataclasses.replace(model.architecture, adapters=None)
    plain = dataclasses.replace(model, architecture=architecture)
    for dtype in ("auto", "float32"):
        with_adapters, without = (footprint(each, device="cuda:0", dtype=dtype) for each in (model, plain))
        assert (with_adapters.weights, with_adapters.activations) == (6 * without.weights, 6 * without.activations)
        assert with_adapters.loading == without.loading  # they load one after the other
    with_adapters, without = (footprint(each, device="cpu") for each in (model, plain))
    stored = load_file(model.folder / "model.safetensors")
    names = [name for name in stored if ".lora_" in name]
    low_rank = 4 * sum(stored[name].numel() for name in names)
    assert with_adapters.activations == without.activations
    assert (
        low_rank <= with_adapters.weights - without.weights <= 1.25 * low_rank
    )  # apart, q, k and v have one side each


def test_a_gpu_is_chosen_for_it(model: Model, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make(model)
    monkeypatch.setattr("embert.engine.encoders.devices.gpu_memory", lambda: [80 << 30] * 2)
    assert refusal(model) is None
    assert devices("auto", "auto", model) == ["cuda:0", "cuda:1"]
    with contextlib.closing(engine.load_encoder(model)) as encoder:
        assert (encoder.device, encoder.name) == ("cuda:0", "cuda")


def test_a_tied_decoder_has_no_adapter(tmp_path: Path, make: Make) -> None:
    """As on a CPU: adapters add to the word table, and the vocabulary's logits come from the table as it is stored."""
    flash(tmp_path)
    path = tmp_path / "model.safetensors"
    draw = torch.Generator().manual_seed(1)
    shapes = {
        "head.weight": (64, 64),
        "head.bias": (64,),
        "norm.weight": (64,),
        "norm.bias": (64,),
        "bias": (VOCABULARY,),
    }
    more = {name: torch.randn(*shape, generator=draw) * 0.3 for name, shape in shapes.items()}
    save_file({**load_file(path), **more}, path)
    head = Splade(Layer("head", "", 64, 64, True, "gelu"), Norm("norm", 1e-5), "", "bias")
    model = dataclasses.replace(engine.load_model(str(tmp_path)), heads=Heads(sparse=head))
    encoder, gpu = make(model)
    stored = Checkpoint.open(model).float32("embeddings.word_embeddings.weight")
    for each in gpu.encoders:
        assert each.shape["splade"] == ("gelu", 1e-5, 1, False)
        np.testing.assert_array_equal(each.loaded["splade.decoder.weight", -1], stored)
    batch = packed().wanting(Task.SPARSE)
    ours, theirs = (
        each.wait(each.submit(batch))[Task.SPARSE].sparse_vectors()
        for each in (encoder, engine.load_encoder(model, device="cpu"))
    )
    for got, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(got.indices, wanted.indices)
        np.testing.assert_allclose(got.values, wanted.values, atol=1e-4)


def test_the_scale_is_the_configs(jina: Jina, model: Model) -> None:
    adapters = model.architecture.adapters
    assert adapters is not None
    stated = json.loads((jina.folder / "config.json").read_text())
    assert (adapters.rank, adapters.scale) == (RANK, stated["lora_alpha"] / stated["lora_rank"])
