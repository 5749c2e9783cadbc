"""The CPU encoder in eight bits beside the definition in numpy, and beside float32."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.lib.texts import english
from embert.engine.batch import pack
from embert.engine.encoders.cpu import linear as int8
from embert.engine.encoders.cpu.runs import Group
from embert.engine.encoders.cpu.transformer import Transformer
from embert.engine.encoders.loader import create_encoder
from embert.engine.encoders.self_test import hidden_state
from embert.engine.engine import Engine
from embert.engine.errors import UnsupportedModel
from embert.engine.model import Model, load_model
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
from tests.engine.quantization.test_definition import drawn
from tests.oracles.model_cases import build

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}


@pytest.mark.parametrize(("columns", "count"), [(128, 300), (384, 8), (384, 65), (1536, 64)])
def test_integers_are_the_definitions_but_for_rounding(columns: int, count: int) -> None:
    x = drawn(count, count, columns)
    x[7] = 0
    ours, wanted = int8.quantized(torch.from_numpy(x)), quantized_rows(x)
    off = np.abs(ours.shifted.numpy().astype(int) - 128 - wanted.integers)
    assert off.max() <= 1
    assert np.count_nonzero(off) < 1e-4 * off.size
    np.testing.assert_allclose(ours.largest.numpy() * int8.SCALE, wanted.scales, rtol=1e-5)


@pytest.mark.cpu("int8")
@pytest.mark.parametrize("rows", [1, 7, 8, 33, 300])
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


@pytest.mark.cpu("int8")
def test_linear_layer_is_the_definitions_product() -> None:
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


@pytest.mark.cpu("int8")
def test_width_that_does_not_fit_is_refused_by_name(build_bert: BuildBert) -> None:
    with pytest.raises(UnsupportedModel, match=r"encoder\.layer\.0\.output\.dense\.weight has 96"):
        Engine.load(str(build_bert(hidden_size=128)), device="cpu", dtype="int8")


ENCODERS = ("torch", "torch-portable")
OPERATORS = torch.library.Library("embert_tests", "FRAGMENT")  # type: ignore[no-untyped-call]
OPERATORS.define("absent(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]  # without a kernel


@pytest.mark.cpu("int8")
def test_layer_equals_the_definition(default_model: Model) -> None:
    """One layer: further ones round what differs in the last bit of float32 to other integers, in numpy as well."""
    model = dataclasses.replace(default_model, config=dataclasses.replace(default_model.config, layers=1))
    sequences = sequences_of(model, 3)
    checkpoint = Checkpoint.open(default_model)
    exact, wanted = (
        [hidden_state(ids, model.config, checkpoint, int8=int8) for ids in sequences] for int8 in (False, True)
    )
    for portable in (False, True):
        layer = Transformer(model.config, checkpoint, torch.float32, int8=True, portable=portable)
        error, cost = [], []
        for ids, rows, exact_rows in zip(sequences, wanted, exact, strict=True):
            with torch.inference_mode():
                tokens = torch.from_numpy(ids.astype(np.int64))
                found = layer(tokens, torch.arange(len(ids)), None, None, [Group(0, 1, len(ids))]).numpy()
            error.append(1 - cosines(found, rows))
            cost.append(1 - cosines(found, exact_rows))
        assert np.concatenate(error).max() < 1e-4  # an integer of a row may be off by one
        assert np.median(np.concatenate(error)) < 1e-6
        assert np.concatenate(error).mean() < 0.02 * np.concatenate(cost).mean()


@pytest.mark.cpu("int8")
@pytest.mark.parametrize("case", ["default", "nomic_bert", "gte", "modernbert", "mpnet", "albert"])
def test_encoders_are_near_the_definition(default_model: Model, case: str, tmp_path: Path) -> None:
    """Rows are nearer to the numpy model in eight bits than to the exact one: at most by a share of the way.

    Where the last bit of a float32 turns an integer over, a row may leave the model's by a thousandth, and which rows
    do so is the CPU's own. So no single row is held to a bound.
    """
    if case == "default":
        # After six layers most of what int8 costs is noise of rounding, and each of the two has its own.
        model, sequences, share = default_model, sequences_of(default_model, 2), 0.9
    else:
        folder = build(tmp_path / "model", case, **WIDE)
        small_tokenizer(64).save(str(folder / "tokenizer.json"))
        # Without the padding token, whose position is not the next one.
        sequences = [np.maximum(ids, 4) for ids in random_sequences([3, 17, 60, 17], 64)]
        model, share = load_model(str(folder)), 0.1
    checkpoint = Checkpoint.open(model)
    exact, wanted = (
        np.concatenate([hidden_state(ids, model.config, checkpoint, int8=int8) for ids in sequences])
        for int8 in (False, True)
    )
    for name in ENCODERS:
        encoder = create_encoder(model, device="cpu", dtype="int8", encoder=name)
        found = encoder.encode(pack(sequences), Task.TOKENS)
        encoder.close()
        error, cost = 1 - cosines(found, wanted), 1 - cosines(exact, wanted)
        assert np.median(error) < share * np.median(cost)
        assert error.mean() < share * cost.mean()


@pytest.mark.parametrize(
    ("sums", "reason"),
    [
        (lambda *_: torch.full((2, 16), 2.0**15), "lacks VNNI"),
        (lambda *_: torch.ops.embert_tests.absent(torch.zeros(1)), "Could not run 'embert_tests::absent'"),
    ],
    ids=["sums that saturate", "a torch without the operator"],
)
def test_cpu_without_exact_sums_is_refused(
    default_model: Model, monkeypatch: pytest.MonkeyPatch, sums: Any, reason: str
) -> None:
    without_own_kernels(monkeypatch)
    monkeypatch.setattr(int8, "exact_sums", sums)
    with pytest.raises(UnsupportedModel) as refused:
        Engine.load(default_model, device="cpu", dtype="int8")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)  # torch lists every backend's kernels on lines of their own


def sequences_of(model: Model, texts: int) -> list[Ids]:
    """Token ids of English texts."""
    encoded = Tokenizer(model).encode(english(texts))
    return np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])


def cosines(ours: Floats, theirs: Floats) -> Floats:
    found: Floats = (unit(ours) * unit(theirs)).sum(1)
    return found
