"""The CUDA encoder's SPLADE head against transformers' masked language models: a whole model, real batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from embert import engine
from embert.engine.batch import PackedBatch, TaskOutput
from embert.engine.encoders.cuda.encoder import CudaEncoder
from embert.engine.errors import UnsupportedModel
from embert.engine.heads.description import Heads, Layer, Norm, Splade
from embert.engine.model import Model
from embert.engine.tasks import Task
from tests.csrc.encoder.random_models import as_dense, packed

pytestmark = pytest.mark.gpu

HIDDEN, VOCABULARY = 256, 30522
TRANSFORM = Layer("cls.predictions.transform.dense", "", HIDDEN, HIDDEN, True, "gelu")
HEAD = Splade(TRANSFORM, Norm("cls.predictions.transform.LayerNorm", 1e-12), "", "cls.predictions.bias")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked language model with random weights, whose texts have about 26 000 pairs each."""
    made = tmp_path_factory.mktemp("splade")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=HIDDEN, num_hidden_layers=3, num_attention_heads=4, intermediate_size=1024, vocab_size=VOCABULARY
    )
    model = transformers.BertForMaskedLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "LayerNorm.weight" in name:
                weight.uniform_(0.5, 1.5)
            elif weight.ndim == 1:
                weight.normal_(0, 0.1)
    model.save_pretrained(made)
    (made / "tokenizer.json").write_text("{}")
    return made


def splade(folder: Path, head: Splade = HEAD) -> Model:
    return dataclasses.replace(engine.load_model(str(folder), pooling="cls"), heads=Heads(sparse=head))


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Iterator[CudaEncoder]:
    made = CudaEncoder(splade(folder))
    yield made
    made.close()


def of(batch: PackedBatch, sequence: int, task: Task) -> PackedBatch:
    return batch.take(np.array([sequence])).with_tasks(task)


def pairs(rows: TaskOutput, place: int) -> tuple[bytes, bytes]:
    one = rows.slice(place, place + 1)
    assert one.indices is not None
    return one.indices.tobytes(), one.values.tobytes()


def hugging_face(folder: Path, batch: PackedBatch, twice: bool) -> npt.NDArray[np.float64]:
    model: Any = transformers.BertForMaskedLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    out = []
    with torch.inference_mode():
        for sequence in range(batch.sequences):
            ids = batch.ids[batch.cu_seqlens[sequence] : batch.cu_seqlens[sequence + 1]]
            logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
            values = torch.log1p(torch.relu(logits)).amax(0)
            out.append((torch.log1p(values) if twice else values).double().numpy())
    return np.stack(out)


@pytest.mark.parametrize(
    ("gemm", "dtype", "cosine"),
    [
        ("hopper", "float16", 0.99999), ("hopper", "bfloat16", 0.999), ("cublaslt", "float16", 0.99999),
        ("cublaslt", "float32", 0.9999999),
    ],
)  # fmt: skip
@pytest.mark.parametrize("twice", [False, True])
def test_against_hugging_face(
    folder: Path, random: np.random.Generator, gemm: str, dtype: str, cosine: float, twice: bool
) -> None:
    batch = packed(random, np.array([3, 16, 17, 40, 129, 512, 64])).with_tasks(Task.SPARSE)
    try:
        made = CudaEncoder(splade(folder, dataclasses.replace(HEAD, twice=twice)), gemm=gemm, dtype=dtype)
    except UnsupportedModel as error:
        pytest.skip(str(error))
    rows = made.wait(made.submit(batch))[Task.SPARSE]
    made.close()
    assert rows.indices is not None
    assert all((np.diff(part) > 0).all() for part in np.split(rows.indices, rows.offsets[1:-1]))
    got, wanted = as_dense(rows), hugging_face(folder, batch, twice)
    norms = np.linalg.norm(got, axis=1) * np.linalg.norm(wanted, axis=1)
    assert ((got * wanted).sum(axis=1) / norms).min() >= cosine
    edge = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-1}[dtype]
    assert (got[wanted > edge] > 0).all()
    assert (wanted[got > edge] > 0).all()


def test_pairs_are_batch_invariant(encoder: CudaEncoder, random: np.random.Generator) -> None:
    """Other texts and other tasks in the batch change no bits."""
    wanted = [Task.SPARSE, Task.SPARSE | Task.EMBED, Task.TOKENS, Task.EMBED, Task.SPARSE | Task.TOKENS] * 20
    batch = packed(random, random.integers(1, 200, len(wanted)), tasks=np.array(wanted, np.uint8))
    outputs = encoder.wait(encoder.submit(batch))
    sparse = outputs[Task.SPARSE]
    for place, sequence in list(enumerate(batch.sequences_of(Task.SPARSE)))[::7]:
        single = encoder.wait(encoder.submit(of(batch, int(sequence), Task.SPARSE)))[Task.SPARSE]
        assert pairs(single, 0) == pairs(sparse, place), sequence
    for task in (Task.EMBED, Task.TOKENS):
        for place, sequence in list(enumerate(batch.sequences_of(task)))[::13]:
            one = encoder.wait(encoder.submit(of(batch, int(sequence), task)))[task]
            assert one.values.tobytes() == outputs[task].slice(place, place + 1).values.tobytes()


def test_more_pairs_than_there_is_room_for(encoder: CudaEncoder, random: np.random.Generator) -> None:
    """Room is for 8 Mi pairs: the rest of the texts run again, while another batch is in flight."""
    batch = packed(random, random.integers(4, 9, 600)).with_tasks(Task.SPARSE)
    other = packed(random, random.integers(1, 100, 30)).with_tasks(Task.SPARSE)
    first, second = encoder.submit(batch), encoder.submit(other)
    rows, others = encoder.wait(first)[Task.SPARSE], encoder.wait(second)[Task.SPARSE]
    assert len(rows.values) > 8 << 20
    assert rows.sequences == 600
    for place in (0, 250, 300, 350, 599):
        single = encoder.wait(encoder.submit(of(batch, place, Task.SPARSE)))[Task.SPARSE]
        assert pairs(single, 0) == pairs(rows, place), place
    again = encoder.wait(encoder.submit(other))[Task.SPARSE]
    assert [pairs(again, i) for i in range(30)] == [pairs(others, i) for i in range(30)]
