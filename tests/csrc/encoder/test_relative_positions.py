"""MPNet's relative positions against transformers in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from embert import engine
from embert.engine.encoders.cuda.encoder import CudaEncoder
from tests.csrc.encoder.random_models import (
    MAX_TOKENS,
    NARROW,
    agrees,
    hugging_face,
    in_parts,
    packed,
    part,
    random_mpnet,
    relative_error,
    with_cublaslt,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def mpnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_mpnet(tmp_path_factory.mktemp("mpnet"), num_hidden_layers=4)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last-token"])
@pytest.mark.parametrize("gemm", ["auto", "cublaslt"])
def test_relative_positions(mpnet: Path, random: np.random.Generator, pooling: str, gemm: str) -> None:
    ours = with_cublaslt(mpnet, pooling, gemm=gemm)
    lengths = np.concatenate([[1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 511, 512], random.integers(1, 300, 40)])
    batch = packed(random, lengths)
    everyone = np.arange(len(lengths))
    together = ours.encode(part(batch, everyone))
    wanted = hugging_face(mpnet, batch, torch.float64, pooling)
    of_torch = relative_error(hugging_face(mpnet, batch, torch.float16, pooling), wanted)
    assert relative_error(together, wanted) <= 1.1 * of_torch
    for rows in (*(everyone[i : i + 1] for i in everyone), random.permutation(everyone)[:7], everyone[::-1]):
        assert agrees(ours, ours.encode(part(batch, rows)), together[rows])
    ours.close()


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_relative_positions_in_other_types(mpnet: Path, random: np.random.Generator, dtype: str, limit: float) -> None:
    batch = packed(random, random.integers(1, 513, 40))
    ours = with_cublaslt(mpnet, dtype=dtype)
    assert relative_error(in_parts(ours, batch), hugging_face(mpnet, batch, torch.float64)) <= limit
    ours.close()


def test_relative_positions_of_narrow_heads(tmp_path: Path, random: np.random.Generator) -> None:
    folder = random_mpnet(tmp_path, **NARROW)
    ours = CudaEncoder(engine.load_model(str(folder)), max_batch_tokens=MAX_TOKENS)
    batch = packed(random, random.integers(1, 513, 100))
    wanted = hugging_face(folder, batch, torch.float64)
    assert relative_error(in_parts(ours, batch), wanted) <= 1.1 * relative_error(
        hugging_face(folder, batch, torch.float16), wanted
    )
    ours.close()
