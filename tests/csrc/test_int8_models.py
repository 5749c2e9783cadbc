"""Whole encoders in 8 bits compared with float16, with numpy and with other batches."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embert import engine
from embert.engine.encoders.cuda.encoder import CudaEncoder
from embert.engine.weights.checkpoint import Checkpoint
from tests.csrc import int8
from tests.csrc.encoder.random_models import (
    LARGE,
    NARROW,
    make_encoder,
    packed,
    part,
    random_bert,
    relative_error,
)
from tests.oracles import model_cases
from tests.oracles.exact import cosines

pytestmark = pytest.mark.gpu


def encoder_of(folder: Path, dtype: str) -> CudaEncoder:
    return make_encoder(engine.load_model(str(folder)), dtype=dtype, gemm="hopper")


BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
SIZES = {"narrow": NARROW, "base": BASE, "large": LARGE}


@pytest.mark.parametrize("size", SIZES)
def test_a_model_agrees_with_float16(tmp_path: Path, random: np.random.Generator, size: str) -> None:
    folder = random_bert(tmp_path, **SIZES[size])
    batch = packed(random, random.integers(8, 300, 80))  # without a mean over tokens it is down to 0.998
    ours = encoder_of(folder, "int8")
    assert (ours.dtype, ours.gemm) == ("int8", "hopper")
    found = ours.encode(batch)
    ours.close()
    exact = encoder_of(folder, "float16")
    assert cosines(found, exact.encode(batch)).min() >= 0.999
    exact.close()


@pytest.mark.parametrize("config", [NARROW | {"num_hidden_layers": 1}, BASE | {"num_hidden_layers": 1}])
def test_a_model_agrees_with_numpys_in_8_bits(
    tmp_path: Path, random: np.random.Generator, config: dict[str, Any]
) -> None:
    folder = random_bert(tmp_path, **config)
    model = engine.load_model(str(folder))
    checkpoint = Checkpoint.open(model)
    ours = encoder_of(folder, "int8")
    lengths = np.array([1, 17, 130])
    batch = packed(random, lengths, normalize=np.zeros(3, np.bool_))
    found = ours.encode(batch)
    ours.close()
    unrounded = engine.load_encoder(model, device="cpu").encode(batch)
    wanted = np.stack(
        [
            int8.hidden_state(batch.ids[begin:end], model.config, checkpoint).mean(axis=0)
            for begin, end in itertools.pairwise(batch.cu_seqlens)
        ]
    )
    # One step of 8 bits more or less moves what comes after it, so bits are not equal; it is much nearer all the same.
    print(relative_error(found, wanted), relative_error(found, unrounded))
    assert relative_error(found, wanted) <= 0.8 * relative_error(found, unrounded)


@pytest.mark.parametrize("size", ["narrow", "base"])
def test_a_text_is_batch_invariant(tmp_path: Path, random: np.random.Generator, size: str) -> None:
    ours = encoder_of(random_bert(tmp_path, **SIZES[size]), "int8")
    lengths = np.concatenate([[1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 128, 129, 511, 512], random.integers(1, 200, 50)])
    batch = packed(random, lengths)
    everyone = np.arange(len(lengths))
    together = ours.encode(part(batch, everyone))
    for _ in range(20):
        rows = random.permutation(everyone)[: int(random.integers(1, len(everyone) + 1))]
        assert ours.encode(part(batch, rows)).tobytes() == together[rows].tobytes()
    for row in everyone:
        assert ours.encode(part(batch, everyone[row : row + 1])).tobytes() == together[[row]].tobytes()
    ours.close()


@pytest.mark.parametrize("case", ["xlm-roberta", "roberta, padded with 5", "distilbert", "mpnet"])
def test_other_architectures(tmp_path: Path, random: np.random.Generator, case: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 512}
    if case == "distilbert":
        sizes = {"dim": 256, "n_heads": 8, "hidden_dim": 512}
    folder = model_cases.build(tmp_path, case, vocab_size=30522, **sizes)
    (folder / "tokenizer.json").write_text("{}")
    ours = encoder_of(folder, "int8")
    batch = packed(random, np.array([1, 17, 64, 65, 128]))
    wanted = engine.load_encoder(engine.load_model(str(folder)), device="cpu").encode(batch)
    assert (
        cosines(ours.encode(batch), wanted).min() >= 0.99
    )  # weights as large as these make attention pick single tokens
    ours.close()
