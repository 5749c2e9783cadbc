"""The CPU encoder in eight bits beside the definition in numpy, and beside float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.lib.texts import english
from embert import engine
from embert.engine.batch import pack
from embert.engine.encoders.cpu import linear as int8
from embert.engine.encoders.cpu.runs import Group
from embert.engine.encoders.cpu.transformer import Transformer
from embert.engine.encoders.loader import create_encoder
from embert.engine.encoders.self_test import hidden_state
from embert.engine.engine import Engine
from embert.engine.errors import UnsupportedModel
from embert.engine.model import Model, load_model
from embert.engine.quantization.accuracy import accuracy_of_rows
from embert.engine.quantization.rows import product, quantized_rows, quantized_weight, sums
from embert.engine.tasks import Task
from embert.engine.tokenization.tokenizer import Tokenizer
from embert.engine.weights.checkpoint import Checkpoint
from tests.engine.conftest import (
    BuildBert,
    Floats,
    Ids,
    random_sequences,
    small_tokenizer,
    unit,
    without_own_kernels,
)
from tests.engine.model_cases import build
from tests.engine.quantization.test_definition import drawn
from tests.engine.quantization.vnni import needs_exact_sums

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}


@pytest.fixture(scope="module", params=["torch", "torch-portable"])
def in_int8(default_model: Model, request: pytest.FixtureRequest) -> Engine:
    return Engine.load(default_model, device="cpu", dtype="int8", max_batch_tokens=4096, encoder=request.param)


@pytest.mark.parametrize("columns", [128, 384, 1536])
@pytest.mark.parametrize("count", [8, 64, 65, 300])
def test_integers_are_the_definitions_but_for_rounding(columns: int, count: int) -> None:
    x = drawn(count, count, columns)
    x[7] = 0
    ours, wanted = int8.quantized(torch.from_numpy(x)), quantized_rows(x)
    off = np.abs(ours.shifted.numpy().astype(int) - 128 - wanted.integers)
    assert off.max() <= 1
    assert np.count_nonzero(off) < 1e-4 * off.size
    np.testing.assert_allclose(ours.largest.numpy() * int8.SCALE, wanted.scales, rtol=1e-5)


@needs_exact_sums
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 16, 33, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 384), (384, 1536), (1536, 384)])
def test_sums_are_exact(rows: int, inputs: int, outputs: int) -> None:
    random = np.random.default_rng(rows)
    weight = quantized_weight(random.normal(size=(outputs, inputs)).astype(np.float32), "w")
    given = quantized_rows(random.normal(size=(rows, inputs)).astype(np.float32))
    given.integers[0] = 127 * np.sign(weight.integers[0])  # as far from 0 as sums of this channel come
    shifted = torch.from_numpy(given.integers).view(torch.uint8).bitwise_xor(128)
    packed = torch.ops.onednn.qlinear_prepack(torch.from_numpy(weight.integers), None)
    found = int8.exact_sums(shifted, packed, torch.ones(outputs), torch.zeros(outputs, dtype=torch.int32))
    np.testing.assert_array_equal(found.numpy(), sums(given, weight).astype(np.float32))


@needs_exact_sums
def test_a_linear_layer_is_the_definitions_product() -> None:
    x, weight, bias = drawn(1, 40, 384), drawn(2, 256, 384), drawn(3, 1, 256)[0]
    other = drawn(4, 40, 256)
    parts = [quantized_weight(weight[:100], "w"), quantized_weight(weight[100:], "w")]
    wanted = product(quantized_rows(x), quantized_weight(weight, "w"), bias)
    given, more, constants = torch.from_numpy(x), torch.from_numpy(other), torch.from_numpy(bias)
    near: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-4 * float(np.abs(wanted).max())}
    linear = int8.Int8Linear(parts, constants)
    np.testing.assert_allclose(linear(given), wanted, **near)
    np.testing.assert_allclose(linear(given, more), wanted + other, **near)
    np.testing.assert_allclose(linear(given, None, more), wanted * other, **{**near, "atol": 50 * near["atol"]})
    np.testing.assert_allclose(int8.Int8Linear(parts, constants, "relu")(given), np.maximum(wanted, 0), **near)
    assert (more.numpy() == other).all()


@needs_exact_sums
@pytest.mark.parametrize("portable", [False, True])
def test_a_layer_is_the_numpy_models(default_model: Model, portable: bool) -> None:
    """One layer: further ones round what differs in the last bit of float32 to other integers, in numpy as well."""
    model = dataclasses.replace(default_model, config=dataclasses.replace(default_model.config, layers=1))
    encoded = Tokenizer(model).encode(english(12))
    sequences = np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])
    # The other layers' tensors are left over for one that reads them.
    checkpoint = Checkpoint.open(default_model)
    layer = Transformer(model.config, checkpoint, torch.float32, int8=True, portable=portable)
    apart, cost = [], []
    for ids in sequences:
        with torch.inference_mode():
            given = torch.from_numpy(ids.astype(np.int64))
            found = layer(given, torch.arange(len(ids)), None, None, [Group(0, 1, len(ids))]).numpy()
        apart.append(cosines(found, hidden_state(ids, model.config, checkpoint, int8=True)))
        cost.append(cosines(found, hidden_state(ids, model.config, checkpoint)))
    assert np.concatenate(apart).min() > 0.9999  # an integer of a row may be off by one
    assert np.median(np.concatenate(apart)) > 0.999999
    assert np.mean(1 - np.concatenate(apart)) < 0.02 * np.mean(1 - np.concatenate(cost))


@needs_exact_sums
def test_an_encoder_agrees_with_the_numpy_model(default_model: Model, in_int8: Engine) -> None:
    encoded = in_int8.tokenizer.encode(english(6))
    sequences = np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])
    # After six layers most of what int8 costs is noise of rounding, and each of the two has its own.
    is_the_numpy_models(tokens_of(in_int8.encoder, sequences), sequences, default_model, share=0.9)


@needs_exact_sums
@pytest.mark.parametrize("encoder", ["torch", "torch-portable"])
@pytest.mark.parametrize("family", ["nomic_bert", "gte", "modernbert", "mpnet", "albert"])
def test_other_families(family: str, encoder: str, tmp_path: Path) -> None:
    folder = build(tmp_path / "model", family, **WIDE)
    small_tokenizer(64).save(str(folder / "tokenizer.json"))
    model = load_model(str(folder))
    # Without the padding token, whose position is not the next one.
    sequences = [np.maximum(ids, 4) for ids in random_sequences([3, 17, 60, 17], 64)]
    loaded = create_encoder(model, device="cpu", dtype="int8", encoder=encoder)
    found = tokens_of(loaded, sequences)
    loaded.close()
    is_the_numpy_models(found, sequences, model)


@needs_exact_sums
def test_a_thousand_texts(default_model: Model, in_int8: Engine) -> None:
    texts = english(1000)
    with Engine.load(default_model, device="cpu") as exact:
        found = accuracy_of_rows(in_int8.embed(texts), exact.embed(texts), dtype="float32")
    assert found.worst >= 0.999
    assert found.neighbours is not None
    assert found.neighbours >= 0.98


@needs_exact_sums
def test_a_width_that_does_not_fit_is_refused_by_name(build_bert: BuildBert) -> None:
    with pytest.raises(
        UnsupportedModel, match=r"multiple of 128 columns; encoder\.layer\.0\.output\.dense\.weight has 96"
    ):
        Engine.load(str(build_bert(hidden_size=128)), device="cpu", dtype="int8")


def test_sums_that_saturate_are_refused(default_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    without_own_kernels(monkeypatch)
    monkeypatch.setattr(int8, "exact_sums", lambda *_: torch.full((2, 16), 2.0**15))
    with pytest.raises(UnsupportedModel, match=r"int8 is not supported on this CPU, which lacks VNNI: it adds .*"):
        Engine.load(default_model, device="cpu", dtype="int8")


def test_a_torch_without_the_operator_is_refused(default_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    without_own_kernels(monkeypatch)
    library = torch.library.Library("embert_tests", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("absent(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]  # without a kernel
    monkeypatch.setattr(int8, "exact_sums", lambda *_: torch.ops.embert_tests.absent(torch.zeros(1)))
    with pytest.raises(UnsupportedModel) as refused:
        Engine.load(default_model, device="cpu", dtype="int8")
    assert "has no int8 products in this torch: Could not run 'embert_tests::absent'" in str(refused.value)
    assert "\n" not in str(refused.value)  # torch lists every backend's kernels on lines of their own


def is_the_numpy_models(found: Sequence[Floats], sequences: Sequence[Ids], model: Model, share: float = 0.1) -> None:
    """The rows are nearer to the numpy model in eight bits than to the exact one: at most by this share of the way.

    Where the last bit of a float32 turns an integer over, a row may leave the model's by a thousandth, and which rows
    do so is the CPU's own. So no single row is held to a bound.
    """
    checkpoint = Checkpoint.open(model)
    apart, cost = (
        np.concatenate(
            [
                1 - cosines(rows, hidden_state(ids, model.config, checkpoint, int8=int8))
                for ids, rows in zip(sequences, found, strict=True)
            ]
        )
        for int8 in (True, False)
    )
    assert np.median(apart) < share * np.median(cost)
    assert apart.mean() < share * cost.mean()


def tokens_of(encoder: engine.Encoder, sequences: Sequence[Ids]) -> list[Floats]:
    """The last hidden states of each sequence."""
    rows = encoder.wait(encoder.submit(pack(sequences).wanting(Task.TOKENS)))[Task.TOKENS]
    return np.split(rows.values, rows.offsets[1:-1])


def cosines(ours: Floats, theirs: Floats) -> Floats:
    found: Floats = (unit(ours) * unit(theirs)).sum(1)
    return found
