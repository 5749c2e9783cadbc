"""Heads of the CUDA encoder against transformers in float64, and sequences of different tasks in one batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.torch
import torch
import transformers

from embert import engine
from embert.engine.batch import PackedBatch, TaskOutput
from embert.engine.encoders.cuda.encoder import CudaEncoder
from embert.engine.heads.description import Classifier, Heads, Layer, MultiVector, Role, TokenWeights
from embert.engine.heads.late_interaction import NO_VECTORS, Scoring
from embert.engine.heads.pooling import Dense
from embert.engine.heads.token_rows import token_weight_rows
from embert.engine.model import Model
from embert.engine.tasks import Task
from tests.csrc.encoder.random_models import agrees, as_dense, packed, random_bert, relative_error, with_cublaslt
from tests.csrc.reference import LENGTHS
from tests.oracles.model_cases import write_modules

pytestmark = pytest.mark.gpu

HIDDEN, WIDTH, LABELS, COLUMNS = 384, 100, 3, 128
CONFIG = {"hidden_size": HIDDEN, "num_hidden_layers": 3, "num_attention_heads": 12, "intermediate_size": 1536}
Doubles = npt.NDArray[np.float64]
CLASSIFIER = (
    Layer("head.dense", "", HIDDEN, HIDDEN, True, "tanh"),
    Layer("head.out", "", HIDDEN, LABELS, True, "identity"),
)
WEIGHTS = Layer("head.sparse", "", HIDDEN, 1, True, "relu")
MULTI = (Layer("head.wide", "", HIDDEN, 768, True, "gelu"), Layer("head.narrow", "", 768, COLUMNS, False, "identity"))
# Those of one model; one that classifies tokens has no multi-vectors.
TASKS: tuple[Task, ...] = tuple(task for task in Task if task < Task.TOKEN_CLASSES)
HEADS = Heads(Classifier(CLASSIFIER, ("a", "b", "c"), "softmax"), TokenWeights(WEIGHTS, ()), MultiVector(MULTI))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with every head, and a Dense module."""
    made = random_bert(tmp_path_factory.mktemp("heads"), **CONFIG)
    path = made / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for layer in (*CLASSIFIER, WEIGHTS, *MULTI):
        tensors[f"{layer.name}.weight"] = torch.randn(layer.outputs, layer.inputs) / layer.inputs**0.5
        if layer.bias:
            tensors[f"{layer.name}.bias"] = torch.randn(layer.outputs) * 0.3
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    write_modules(made, dense=[(HIDDEN, WIDTH, "torch.nn.modules.activation.Tanh")])
    return made


def described(folder: Path, **more: Any) -> Model:
    return dataclasses.replace(engine.load_model(str(folder)), heads=HEADS, embeds=True, **more)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Iterator[CudaEncoder]:
    made = CudaEncoder(described(folder, pooling="cls"), max_batch_tokens=16384)
    yield made
    made.close()


def part(batch: PackedBatch, rows: npt.NDArray[np.int64] | list[int], tasks: Any) -> PackedBatch:
    """Some sequences of a batch; `tasks`: of each, or of all."""
    return dataclasses.replace(batch.take(np.array(rows)), tasks=np.broadcast_to(np.uint8(tasks), len(rows)))


def run(encoder: CudaEncoder, batch: PackedBatch) -> dict[Task, TaskOutput]:
    return encoder.wait(encoder.submit(batch))


def same(encoder: CudaEncoder, got: TaskOutput, wanted: TaskOutput) -> bool:
    """The same bits, or up to rounding where no bits are promised. Rounding may add or drop a pair next to 0."""
    if got.indices is not None and encoder.gemm != "hopper":
        return True
    if got.offsets.tolist() != wanted.offsets.tolist() or not agrees(encoder, got.values, wanted.values):
        return False
    return got.indices is None or (wanted.indices is not None and got.indices.tolist() == wanted.indices.tolist())


def states_of(folder: Path, batch: PackedBatch, dtype: torch.dtype) -> list[Doubles]:
    """The last hidden state of each text, from transformers on the GPU."""
    model: Any = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False, dtype=dtype).cuda().eval()
    found = []
    for first, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids = torch.tensor(batch.ids[first:end].astype(np.int64), device="cuda")
        with torch.inference_mode():
            found.append(model(input_ids=ids[None]).last_hidden_state[0].double().cpu().numpy())
    return found


def linear(tensors: dict[str, torch.Tensor], layer: Layer, x: Doubles) -> Doubles:
    y = torch.from_numpy(x) @ tensors[f"{layer.name}.weight"].double().T
    if layer.bias:
        y = y + tensors[f"{layer.name}.bias"].double()
    kinds = {"identity": lambda v: v, "tanh": torch.tanh, "gelu": torch.nn.functional.gelu, "relu": torch.relu}
    made: Doubles = kinds[layer.activation](y).numpy()
    return made


def reference(folder: Path, pooling: str, states: list[Doubles]) -> dict[Task, Doubles]:
    """Every task of every text, in float64; SPARSE: a weight a token."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    (dense_folder,) = (each.folder for each in engine.load_model(str(folder)).after_pooling if isinstance(each, Dense))
    tensors |= safetensors.torch.load_file(folder / dense_folder / "model.safetensors")
    dense = Layer("linear", "", HIDDEN, WIDTH, "linear.bias" in tensors, "tanh")
    pool = {
        "cls": lambda x: x[0],
        "mean": lambda x: x.mean(0),
        "max": lambda x: x.max(0),
        "last-token": lambda x: x[-1],
    }
    vectors = linear(tensors, dense, np.stack([pool[pooling](text) for text in states]))
    tokens, first = np.concatenate(states), np.stack([text[0] for text in states])
    multi = linear(tensors, MULTI[1], linear(tensors, MULTI[0], tokens))
    return {
        Task.EMBED: vectors / np.linalg.norm(vectors, axis=1, keepdims=True),
        Task.TOKENS: tokens,
        Task.CLASSIFY: linear(tensors, CLASSIFIER[1], linear(tensors, CLASSIFIER[0], first)),
        Task.SPARSE: linear(tensors, WEIGHTS, tokens),
        Task.MULTI: multi / np.linalg.norm(multi, axis=1, keepdims=True),
    }


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "last-token"])
@pytest.mark.parametrize(("gemm", "dtype", "limit"), [
    ("auto", "float16", 0.0), ("auto", "bfloat16", 2e-2), ("cublaslt", "float16", 0.0), ("cublaslt", "float32", 2e-5),
])  # fmt: skip
def test_every_head_against_float64(
    folder: Path, random: np.random.Generator, pooling: str, gemm: str, dtype: str, limit: float
) -> None:
    ours = with_options(folder, pooling, gemm=gemm, dtype=dtype)
    batch = packed(random, np.array([*LENGTHS, *random.integers(1, 200, 30)]))
    lengths = np.diff(batch.cu_seqlens)
    wanted = reference(folder, pooling, states_of(folder, batch, torch.float64))
    of_torch = reference(folder, pooling, states_of(folder, batch, torch.float16))
    outputs = run(ours, part(batch, list(range(len(lengths))), sum(TASKS)))
    for task in TASKS:
        allowed = limit or 1.5 * relative_error(of_torch[task], wanted[task])
        values = outputs[task].values
        if task != Task.SPARSE:
            assert relative_error(values, wanted[task]) <= allowed, task
            continue
        exact = token_weight_rows(batch.ids, batch.cu_seqlens, wanted[task][:, 0].astype(np.float32), ())
        dense, dense_exact = (as_dense(rows) for rows in (outputs[task], exact))
        assert relative_error(dense, dense_exact) <= allowed
        assert ((dense > 0) == (dense_exact > 0))[dense_exact > max(1e-2, 5 * allowed)].all()
    for rows, counts in ((outputs[Task.MULTI], lengths), (outputs[Task.CLASSIFY], np.ones_like(lengths))):
        assert (rows.counts == counts).all()
    ours.close()


def with_options(folder: Path, pooling: str, **options: Any) -> CudaEncoder:
    """An encoder with all heads. Skips where it needs cuBLASLt and this build was made without its header."""
    if options.get("gemm") == "cublaslt":
        with_cublaslt(folder, pooling, **options).close()
    return CudaEncoder(described(folder, pooling=pooling), max_batch_tokens=16384, **options)


@pytest.mark.parametrize("pooling", ["cls", "mean", "last-token"])
@pytest.mark.parametrize("gemm", ["auto", "cublaslt"])
def test_tasks_of_one_batch_do_not_touch_each_other(
    folder: Path, random: np.random.Generator, pooling: str, gemm: str
) -> None:
    """A text has the same bits for a task alone, with other tasks, and with other texts that request others."""
    ours = with_options(folder, pooling, gemm=gemm)
    batch = packed(random, np.array([*LENGTHS, *random.integers(1, 200, 60)]))
    everyone = np.arange(len(LENGTHS) + 60)
    single = {task: run(ours, part(batch, everyone, task))[task] for task in TASKS}
    for _ in range(20):
        count = int(random.integers(1, len(everyone) + 1))
        rows, tasks = random.permutation(everyone)[:count], random.integers(1, 32, count)
        mixed = part(batch, rows, tasks)
        outputs = run(ours, mixed)
        assert set(outputs) == {task for task in TASKS if task in mixed.wanted}
        for task, got in outputs.items():
            chosen = rows[mixed.sequences_of(task)]
            assert same(ours, got, TaskOutput.concatenate([single[task].slice(i, i + 1) for i in chosen])), task
    for row in range(len(everyone)):
        for task in TASKS:
            one = run(ours, part(batch, [row], task))[task]
            assert same(ours, one, single[task].slice(row, row + 1)), (task, row)
    ours.close()


@pytest.mark.parametrize(("gemm", "dtype"), [("auto", "float16"), ("auto", "bfloat16"), ("cublaslt", "float32")])
@pytest.mark.parametrize("mean", [False, True])
def test_scores_are_those_of_the_vectors(
    folder: Path, random: np.random.Generator, gemm: str, dtype: str, mean: bool
) -> None:
    """Alone or in a batch, with queries of up to four parts, and with texts that request vectors."""
    if gemm == "cublaslt":
        with_cublaslt(folder, "cls", gemm=gemm, dtype=dtype).close()
    skipped = (1996, 1012)
    head = MultiVector(MULTI, skips_first=True, document=Role(skipped=skipped), mean_of_query=mean)
    model = engine.load_model(str(folder))
    model = dataclasses.replace(model, heads=Heads(multi_vector=head), embeds=False, after_pooling=())
    ours = CudaEncoder(model, max_batch_tokens=16384, gemm=gemm, dtype=dtype)
    queries = [32, 1, 33, 34, 100, 128]
    lengths = np.array([*queries, *LENGTHS, *random.integers(1, 300, 40)])
    is_query = np.arange(len(lengths)) < len(queries)
    order = np.concatenate([[0], 1 + random.permutation(len(lengths) - 1)])
    batch = packed(random, lengths[order])
    batch.ids[random.random(batch.tokens) < 0.2] = skipped[0]
    of_all = np.repeat(np.arange(len(lengths)), lengths[order])
    batch.ids[of_all == int(np.flatnonzero(~is_query[order])[-1])] = skipped[1]  # a document without vectors
    scored = batch.with_tasks(Task.CLASSIFY).with_queries(is_query[order])
    scoring = Scoring.of(scored, head)
    assert scoring is not None
    got = run(ours, scored)[Task.CLASSIFY].values
    vectors = run(ours, batch.with_tasks(Task.MULTI))
    np.testing.assert_allclose(got, scoring.finish(vectors)[Task.CLASSIFY].values, rtol=2e-5, atol=2e-5)
    assert got.min() == NO_VECTORS
    asked = np.maximum.accumulate(np.where(is_query[order], np.arange(len(lengths)), 0))
    for number, document in enumerate(scored.sequences_of(Task.CLASSIFY)):
        pair = scored.take(np.array([asked[document], document]))
        assert agrees(ours, run(ours, pair)[Task.CLASSIFY].values, got[number : number + 1]), number
    assert scored.tasks is not None
    half = (random.random(len(lengths)) < 0.5) & ~is_query[order]
    mixed = dataclasses.replace(scored, tasks=np.where(half, np.uint8(Task.MULTI), scored.tasks))
    outputs = run(ours, mixed)
    assert same(ours, outputs[Task.MULTI], vectors[Task.MULTI].take(np.flatnonzero(half)))
    assert agrees(ours, outputs[Task.CLASSIFY].values, got[~half[scored.sequences_of(Task.CLASSIFY)]])
    ours.close()
