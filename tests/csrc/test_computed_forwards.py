"""The CUDA encoder's host side as a whole, without a GPU: its kernels are replaced by ones that compute on the CPU.

What these tests check is everything else: the order of weights, the program, which LayerNorm is folded where.
"""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from embert import engine
from embert.engine.batch import PackedBatch, cumulative
from embert.engine.encoders.cuda.heads import decider_tensors
from embert.engine.encoders.cuda.shapes import encoder_fields, layer_attention, marker_decider
from embert.engine.encoders.cuda.weights import layer_tensors
from embert.engine.encoders.torch.encoder import TorchEncoder
from embert.engine.heads.description import MARKED_OPTIONS
from embert.engine.model import Model
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.models.tensor_names import WORD_EMBEDDINGS
from embert.engine.tasks import Task
from embert.engine.weights.checkpoint import Checkpoint
from tests.csrc import int8
from tests.csrc.encoder.random_models import random_bert
from tests.csrc.host_program import HOST_SIDE, build
from tests.csrc.reference import BFLOAT16, FLOAT16, FLOAT32, row_errors
from tests.engine.test_decisions import laya
from tests.oracles.described import ARCHITECTURES, described

pytestmark = pytest.mark.timeout(600)  # compilers, on cores that others may use

LENGTHS = [70, 1, 40, 32, 5]
MAX_TOKENS = 160
HOPPER, PORTABLE = "hopper", "cublaslt"
ACTIVATIONS = {"gelu": 1, "gelu_tanh": 2, "relu": 3, "silu": 4}
POOLINGS = {"cls": 0, "mean": 1, "last-token": 3}
INT8 = 3
GELU = 4  # HeadActivation
CONVERTED = 4 << 20  # kConvertedElements of csrc/encoder/weights.h
STORED = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16, "int8": INT8}
ALLOWED = {FLOAT32: 1e-5, FLOAT16: 4e-3}  # of a row's length

Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).with_name("computed_forwards.cpp")
    return build(tmp_path_factory.mktemp("computed"), source, *HOST_SIDE)


def computed(
    program: Path, model: Model, gemm: str, dtype: int, batch: PackedBatch, adapter: int = -1, most: int = MAX_TOKENS
) -> tuple[Floats, Floats]:
    """The rows of all tokens, or the logits of a decider, and the pooled vectors as they are.

    All texts have one adapter, or none.
    """
    found = outputs(program, model, gemm, dtype, batch, adapter, most)
    pooled = found[-batch.sequences * model.config.hidden_size :].reshape(batch.sequences, -1)
    rows = batch.tokens if marker_decider(model) is None else batch.sequences
    return found[: -pooled.size].reshape(rows, -1), pooled


def outputs(
    program: Path,
    model: Model,
    gemm: str,
    dtype: int,
    batch: PackedBatch,
    adapter: int = -1,
    most: int = MAX_TOKENS,
    *,
    label_mass: bool = False,
    vocabulary: Floats | None = None,
    attended: Sequence[int] = (),
) -> Floats:
    """The flattened results of `computed`. With `label_mass`, those of LABEL_MASS follow.

    `attended`: the first tokens of each text that are attended to, of texts that have others.
    """
    config, decider, checkpoint = model.config, marker_decider(model), Checkpoint.open(model)
    told = [*told_fields(config), "pooling", POOLINGS[model.pooling]]
    tensors = list(layer_tensors(config, checkpoint.with_adapter(adapter), dtype == INT8))
    if decider is not None:
        types, columns = decider.config.type_vocab_size, decider.config.hidden_size
        told += ["task_heads", MARKED_OPTIONS, decider.marker, types, 0, 0, 0, 1, "end", *told_fields(decider.config)]
        told += ["continues", 1, "task_heads", 0, 0, 0, 1, columns, columns, GELU, 1, 0, 1]
        tensors += decider_tensors(model, checkpoint, "float32")
    if label_mass:
        told += ["task_heads", 0, 0, 0, 0, 0, 1, int(vocabulary is None)]
    tensors += [] if vocabulary is None else [("vocabulary.weight", -1, vocabulary, "float32")]
    told += ["end", max(most, batch.tokens), len(tensors)]
    data, out = model.folder / "tensors", model.folder / "rows"
    with data.open("wb") as file:
        for name, layer, array, stored in tensors:
            told += [name, layer, STORED[stored], array.ndim, *array.shape]
            file.write(np.ascontiguousarray(array).tobytes())
    prefixes = [] if batch.prefixes is None else batch.prefixes.reshape(-1).tolist()
    types = [] if batch.token_types is None else batch.token_types.tolist()
    told += [len(batch.cu_seqlens) - 1, *np.diff(batch.cu_seqlens), *batch.ids, len(types), *types]
    told += [len(prefixes), *prefixes, len(attended), *attended]
    command: list[str | Path] = [program, gemm, str(dtype), data, out]
    ran = subprocess.run(command, input=" ".join(map(str, told)), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return np.fromfile(out, np.float32)


def told_fields(config: EncoderConfig) -> list[object]:
    attention = layer_attention(config)
    told: list[object] = ["activation", ACTIVATIONS[config.activation]]
    told += ["attention", len(attention), *itertools.chain(*attention)]
    for name, value in encoder_fields(config).items():
        told += (
            [name, len(value), *value]
            if isinstance(value, tuple)
            else [name, int(value) if isinstance(value, bool) else value]
        )
    return told


def drawn(model: Model, lengths_of_texts: Sequence[int] = LENGTHS) -> PackedBatch:
    lengths = np.array(lengths_of_texts, np.int32)
    ids = np.random.default_rng(11).integers(0, model.config.vocab_size, lengths.sum()).astype(np.int32)
    return PackedBatch(ids, cumulative(lengths), normalize=np.zeros(len(lengths), np.bool_))


def compare(program: Path, model: Model, gemm: str, dtype: int, batch: PackedBatch | None = None) -> None:
    most = MAX_TOKENS if batch is None else batch.tokens
    batch = batch or drawn(model)
    cpu = TorchEncoder(model, dtype="float32", max_batch_tokens=1 << 12)
    wanted = cpu.encode(batch, Task.TOKENS), cpu.encode(batch)
    for got, of in zip(computed(program, model, gemm, dtype, batch, most=most), wanted, strict=True):
        assert row_errors(got, of).max() <= ALLOWED[dtype]


@pytest.mark.parametrize(
    ("gemm", "dtype", "stored"),
    [(PORTABLE, FLOAT32, torch.float32), (HOPPER, FLOAT16, torch.float16)],
    ids=["portable", "hopper, gamma in the rows"],
)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_forwards_are_the_cpu_encoders(
    program: Path, tmp_path: Path, kind: str, gemm: str, dtype: int, stored: torch.dtype
) -> None:
    compare(program, described(tmp_path, kind, stored=stored), gemm, dtype)


@pytest.mark.parametrize("gemm", [HOPPER, PORTABLE])
@pytest.mark.parametrize(
    ("kind", "pooling"),
    [
        ("ModernBERT's", "cls"),
        ("ELECTRA's", "last-token"),
        ("Nomic's", "cls"),
        ("Nomic's with experts", "cls"),
        ("ALBERT's", "cls"),
        ("Qwen3's", "last-token"),
        ("LLaMA's", "last-token"),
        ("LFM2's", "last-token"),
        ("Gemma's", "last-token"),
    ],
)
def test_rows_that_pooling_does_not_read_may_be_skipped(
    program: Path, tmp_path: Path, kind: str, gemm: str, pooling: str
) -> None:
    compare(program, described(tmp_path, kind, pooling=pooling), gemm, FLOAT16)


@pytest.mark.parametrize("gemm", [HOPPER, PORTABLE])
@pytest.mark.parametrize("kind", ["Qwen3's", "LLaMA's"])
def test_rows_of_a_shared_prefix(program: Path, tmp_path: Path, kind: str, gemm: str) -> None:
    model = described(tmp_path, kind, pooling="last-token")
    batch = drawn(model, [20, 100, 90, 57, 33])
    begins = np.array([(0, 0), (0, 0), (1, 88), (1, 56), (1, 8)], np.int32)
    for sequence, (owner, tokens) in enumerate(begins):
        of, own = batch.cu_seqlens[owner], batch.cu_seqlens[sequence]
        batch.ids[own : own + tokens] = batch.ids[of : of + tokens]
    rows, pooled = computed(program, model, gemm, FLOAT16, batch.with_prefixes(begins))
    every, expected = computed(program, model, gemm, FLOAT16, batch)
    positions = np.concatenate([np.arange(length) for length in np.diff(batch.cu_seqlens)])
    np.testing.assert_array_equal(rows, every[positions >= np.repeat(begins[:, 1], np.diff(batch.cu_seqlens))])
    np.testing.assert_array_equal(pooled, expected)


@pytest.mark.parametrize(("gemm", "dtype"), [(PORTABLE, FLOAT32), (HOPPER, FLOAT16)])
@pytest.mark.parametrize("kind", ["ELECTRA's", "JinaBERT's", "ModernBERT's", "LFM2's"])
def test_tokens_that_are_not_attended_to(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, gemm: str, dtype: int
) -> None:
    """In short texts and in long ones; some are too far behind the others for any window."""
    model = described(tmp_path, kind)
    batch, attended = drawn(model, [70, 1, 40, 32, 5, 33]), np.array([5, 1, 40, 9, 4, 32], np.int32)
    rows = outputs(program, model, gemm, dtype, batch, most=batch.tokens, attended=attended.tolist())
    monkeypatch.setattr("embert.engine.encoders.cpu.encoder.attended_tokens", lambda *_: attended)
    wanted = TorchEncoder(model, dtype="float32", max_batch_tokens=1 << 12).encode(batch, Task.TOKENS)
    assert row_errors(rows[: wanted.size].reshape(wanted.shape), wanted).max() <= ALLOWED[dtype]


@pytest.mark.parametrize(("gemm", "dtype"), [(PORTABLE, FLOAT32), (PORTABLE, FLOAT16), (HOPPER, FLOAT16)])
def test_layers_that_make_decisions(program: Path, tmp_path: Path, gemm: str, dtype: int) -> None:
    laya(tmp_path)
    model = engine.load_model(str(tmp_path))
    decider = marker_decider(model)
    assert decider is not None
    batch = drawn(model, [60, 1, 40, 33, 5])
    batch.ids[np.random.default_rng(3).integers(0, batch.tokens, 20)] = decider.marker
    types = np.repeat(np.array([2, 0, 1, 0, 2], np.int32), np.diff(batch.cu_seqlens))
    tasks = np.full(batch.sequences, Task.DECIDE, np.uint8)
    batch = dataclasses.replace(batch, token_types=types, tasks=tasks)
    cpu = TorchEncoder(model, dtype="float32", max_batch_tokens=1 << 12)
    expected = cpu.wait(cpu.submit(batch))[Task.DECIDE].values
    logits, _ = computed(program, model, gemm, dtype, batch)
    print(np.abs(logits - expected).max(), np.abs(expected).max())
    assert ((logits == 0) == (expected == 0)).all()
    assert np.abs(logits - expected).max() <= 2 * ALLOWED[dtype] * np.abs(expected).max()


@pytest.mark.parametrize("gemm", [HOPPER, PORTABLE])
@pytest.mark.parametrize("tied", [True, False])
def test_label_mass_is_of_the_last_tokens_row(program: Path, tmp_path: Path, gemm: str, tied: bool) -> None:
    model = described(tmp_path, "Qwen3's", pooling="last-token")
    batch, table = drawn(model), Checkpoint.open(model).float32(WORD_EMBEDDINGS)
    own = None if tied else np.random.default_rng(12).standard_normal(table.shape).astype(np.float32)
    found = outputs(program, model, gemm, FLOAT16, batch, label_mass=True, vocabulary=own)
    pooled, masses = np.split(found[batch.tokens * model.config.hidden_size :], [-len(LENGTHS)])
    matrix = (table if own is None else own).astype(np.float16)
    logits = pooled.reshape(len(LENGTHS), -1).astype(np.float64) @ matrix.T
    np.testing.assert_allclose(masses, np.logaddexp.reduce(logits, axis=1), rtol=1e-6)


@pytest.mark.parametrize("gemm", [HOPPER, PORTABLE])
def test_tensors_are_converted_in_parts(program: Path, tmp_path: Path, gemm: str) -> None:
    """Tables and interleaved gates of more elements than are converted at a time."""
    large = CONVERTED // 64 + 8
    more: dict[str, Any] = {"hidden_size": 64, "layers": 1, "vocab_size": large, "intermediate_size": large}
    model = described(tmp_path, "LLaMA's", attention=(), **more)
    compare(program, model, gemm, FLOAT16, drawn(model, [5, 3]))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_forwards_in_8_bits_are_numpys(program: Path, tmp_path: Path, pooling: str) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 384, "num_hidden_layers": 1}
    model = dataclasses.replace(engine.load_model(str(random_bert(tmp_path, **sizes))), pooling=pooling)
    batch = drawn(model)
    rows, pooled = computed(program, model, HOPPER, INT8, batch)
    checkpoint = Checkpoint.open(model)
    wanted = [
        int8.hidden_state(batch.ids[begin:end], model.config, checkpoint)
        for begin, end in itertools.pairwise(batch.cu_seqlens)
    ]
    errors = row_errors(rows, np.concatenate(wanted))
    assert errors.max() <= ALLOWED[FLOAT16]
    # One step of 8 bits more or less moves what comes after it, so bits are not equal; it is nearer all the same.
    unrounded = row_errors(rows, TorchEncoder(model, max_batch_tokens=1 << 12).encode(batch, Task.TOKENS))
    print(np.median(errors), np.median(unrounded))
    assert np.median(errors) <= 0.85 * np.median(unrounded)
    for text, vector in zip(wanted, pooled, strict=True):
        of_text = text.mean(axis=0) if pooling == "mean" else text[0]
        assert np.linalg.norm(vector - of_text) <= ALLOWED[FLOAT16] * np.linalg.norm(of_text)
