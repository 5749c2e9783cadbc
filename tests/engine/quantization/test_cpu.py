"""The CPU encoder in int8 compared with the definition in numpy and with float32."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.lib.texts import english
from embert.engine.batch import pack
from embert.engine.encoders.cpu.operators import KernelOperators
from embert.engine.encoders.cpu.runs import Group
from embert.engine.encoders.cpu.transformer import Transformer
from embert.engine.encoders.loader import create_encoder
from embert.engine.encoders.self_test import hidden_state
from embert.engine.engine import Engine
from embert.engine.errors import UnsupportedModel
from embert.engine.model import Model, load_model
from embert.engine.tasks import Task
from embert.engine.tokenization.tokenizer import Tokenizer
from embert.engine.weights.checkpoint import Checkpoint
from tests.engine.conftest import BuildBert, Floats, Ids, random_sequences, small_tokenizer, unit, without_own_kernels
from tests.oracles.model_cases import build

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}


@pytest.mark.cpu("kernels")
def test_width_that_does_not_fit_is_refused_by_name(build_bert: BuildBert) -> None:
    with pytest.raises(UnsupportedModel, match=r"encoder\.layer\.0\.output\.dense\.weight has 96"):
        Engine.load(str(build_bert(hidden_size=128)), device="cpu", dtype="int8")


@pytest.mark.cpu("kernels")
def test_layer_equals_the_definition(default_model: Model) -> None:
    """One layer: further ones round what differs in the last bit of float32 to other integers, in numpy as well."""
    model = dataclasses.replace(default_model, config=dataclasses.replace(default_model.config, layers=1))
    sequences = sequences_of(model, 3)
    checkpoint = Checkpoint.open(default_model)
    exact, wanted = (
        [hidden_state(ids, model.config, checkpoint, int8=int8) for ids in sequences] for int8 in (False, True)
    )
    layer = Transformer(model.config, checkpoint, KernelOperators(int8=True))
    error, cost = [], []
    for ids, rows, exact_rows in zip(sequences, wanted, exact, strict=True):
        found = layer(ids.astype(np.int64), np.arange(len(ids)), None, None, [Group(0, 1, len(ids))])
        error.append(1 - cosines(found, rows))
        cost.append(1 - cosines(found, exact_rows))
    assert np.concatenate(error).max() < 1e-4  # an integer of a row may be off by one
    assert np.median(np.concatenate(error)) < 1e-6
    assert np.concatenate(error).mean() < 0.02 * np.concatenate(cost).mean()


@pytest.mark.cpu("kernels")
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
    encoder = create_encoder(model, device="cpu", dtype="int8", encoder="cpu")
    found = encoder.encode(pack(sequences), Task.TOKENS)
    encoder.close()
    error, cost = 1 - cosines(found, wanted), 1 - cosines(exact, wanted)
    assert np.median(error) < share * np.median(cost)
    assert error.mean() < share * cost.mean()


def test_int8_needs_kernels(default_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModel, match="dtype int8 is not supported on a CPU by the torch encoder"):
        Engine.load(default_model, device="cpu", dtype="int8", encoder="torch")
    without_own_kernels(monkeypatch)
    with pytest.raises(UnsupportedModel, match="int8 on the cpu encoder needs embert's kernels"):
        Engine.load(default_model, device="cpu", dtype="int8")


def sequences_of(model: Model, texts: int) -> list[Ids]:
    """Token ids of English texts."""
    encoded = Tokenizer(model).encode(english(texts))
    return np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])


def cosines(ours: Floats, theirs: Floats) -> Floats:
    found: Floats = (unit(ours) * unit(theirs)).sum(1)
    return found
