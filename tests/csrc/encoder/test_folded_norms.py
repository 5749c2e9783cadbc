"""LayerNorms that the matrix products around them take over, and weights that do not allow it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from embert import engine
from embert.engine.encoders.cuda.encoder import CudaEncoder
from tests.csrc.encoder.random_models import (
    MAX_TOKENS,
    hugging_face,
    in_parts,
    packed,
    random_bert,
    relative_error,
)
from tests.oracles.exact import cosines

pytestmark = pytest.mark.gpu


# A checkpoint in FP32 is rounded by transformers as a whole, here only its matrices: vectors stay as they are, of which
# gamma alone would cost more. In 16 bits nothing is rounded on either side; folded, a LayerNorm's output is not either.
# Measured, times transformers' error: 0.44 to 0.64, 0.58 to 0.80 (docs/encoder.md).
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fold", [True, False])
def test_layernorm_folded_or_separate(
    tmp_path: Path, random: np.random.Generator, stored: torch.dtype, fold: bool
) -> None:
    folder = random_bert(tmp_path, stored)
    batch = packed(random, random.integers(1, 513, 40))
    ours = CudaEncoder(engine.load_model(str(folder)), max_batch_tokens=MAX_TOKENS, fold=fold)
    assert ours.layernorm == ("folded" if fold and ours.gemm == "hopper" else "separate")
    wanted = hugging_face(folder, batch, torch.float64)
    allowed = 0.8 if stored == torch.float32 else 0.9 if ours.layernorm == "folded" else 1.1
    of_torch = relative_error(hugging_face(folder, batch, torch.float16), wanted)
    assert relative_error(in_parts(ours, batch), wanted) <= allowed * of_torch
    ours.close()


@contextlib.contextmanager
def changed(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The weights of a model, to be changed in place."""
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    yield weights
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})


def started(folder: Path, layernorm: str, refusal: str) -> CudaEncoder:
    """An encoder whose LayerNorms are "folded", or "separate" because of `refusal`."""
    ours = CudaEncoder(engine.load_model(str(folder)), max_batch_tokens=MAX_TOKENS)
    if ours.gemm == "hopper":
        assert ours.layernorm == layernorm
        assert (refusal in ours.fold_refusal) == (layernorm == "separate")
    return ours


def test_a_gamma_that_cannot_be_folded(tmp_path: Path, random: np.random.Generator) -> None:
    folder = random_bert(tmp_path, num_hidden_layers=2)
    with changed(folder) as weights:
        weights["encoder.layer.0.attention.output.LayerNorm.weight"][:] = 1e-6
    ours = started(folder, "separate", "gamma cannot be folded")
    batch = packed(random, np.array([5, 300]))
    # Such a LayerNorm's output is near FP16's smallest numbers, folded or not.
    assert cosines(in_parts(ours, batch), hugging_face(folder, batch, torch.float64)).min() >= 0.999
    ours.close()


@pytest.mark.parametrize(("gamma", "layernorm"), [(80.0, "folded"), (125.0, "separate")])
def test_rows_that_only_gamma_makes_too_large(
    tmp_path: Path, random: np.random.Generator, gamma: float, layernorm: str
) -> None:
    # An element of 700 times gamma is left for the product that takes the LayerNorm over, in FP16: up to 65 504.
    folder = random_bert(tmp_path, torch.float16, num_hidden_layers=2)
    layer, at = "encoder.layer.0.", 5
    with changed(folder) as weights:
        weights[layer + "attention.output.dense.bias"][at] = 700.0
        weights[layer + "attention.output.LayerNorm.weight"][at] = gamma
        weights[layer + "intermediate.dense.weight"][:, at] = 0.0
        weights[layer + "output.LayerNorm.weight"][at] = 0.01
    ours = started(folder, layernorm, "a row before it is not finite")
    batch = packed(random, np.array([5, 300]))
    wanted = hugging_face(folder, batch, torch.float64)
    of_torch = relative_error(hugging_face(folder, batch, torch.float16), wanted)
    assert relative_error(in_parts(ours, batch), wanted) <= 1.1 * of_torch
    ours.close()


@pytest.mark.parametrize(("offset", "layernorm"), [(5.0, "folded"), (200.0, "separate")])
def test_rows_that_stand_off_zero(tmp_path: Path, random: np.random.Generator, offset: float, layernorm: str) -> None:
    folder = random_bert(tmp_path, num_hidden_layers=2)
    with changed(folder) as weights:
        weights["encoder.layer.1.attention.output.dense.bias"][:] += offset
    ours = started(folder, layernorm, "deviations, at most 30")
    batch = packed(random, np.array([5, 300]))
    # FP16 holds a row at 200 in steps of 1/8, folded or not.
    limit = 3e-3 if offset < 10 else 0.1
    assert relative_error(in_parts(ours, batch), hugging_face(folder, batch, torch.float64)) <= limit
    ours.close()
