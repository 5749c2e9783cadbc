"""Encoders newer than BERT on a GPU: against the CPU encoder in float32, and the same in any batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from embert.engine.batch import PackedBatch, pack
from embert.engine.encoders.torch.encoder import TorchEncoder
from embert.engine.errors import EncoderError
from embert.engine.model import Model
from embert.engine.models.encoder_config import Attention, Rotary
from embert.engine.tasks import Task
from tests.csrc.encoder.random_models import make_encoder
from tests.csrc.reference import row_errors
from tests.csrc.test_computed_forwards import drawn
from tests.oracles.described import ARCHITECTURES, described

pytestmark = pytest.mark.gpu

LONGEST = 1100
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 400, LONGEST]
# Of a vector's length: above rounding, which the models' few layers keep small, and far below any mistake.
ALLOWED = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 2.5e-2}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return described(tmp_path_factory.mktemp("model"), request.param, max_positions=LONGEST)


@pytest.fixture(scope="module")
def batch(model: Model) -> PackedBatch:
    return drawn(model, LENGTHS)


@pytest.fixture(scope="module")
def wanted(model: Model, batch: PackedBatch) -> npt.NDArray[np.float32]:
    cpu = TorchEncoder(model, dtype="float32", max_batch_tokens=1 << 14)
    return cpu.encode(batch, Task.TOKENS)


@pytest.mark.parametrize(
    ("dtype", "gemm", "fold"),
    [
        ("float32", "auto", True), ("float16", "auto", True), ("float16", "auto", False), ("float16", "cublaslt", True),
        ("bfloat16", "auto", True), ("bfloat16", "cublaslt", True),
    ],
)  # fmt: skip
def test_token_vectors_are_the_cpus(
    model: Model, batch: PackedBatch, wanted: npt.NDArray[np.float32], dtype: str, gemm: str, fold: bool
) -> None:
    encoder = make_encoder(model, max_batch_tokens=4096, dtype=dtype, gemm=gemm, fold=fold)
    try:
        assert row_errors(encoder.encode(batch, Task.TOKENS), wanted).max() <= ALLOWED[dtype]
    finally:
        encoder.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("columns", [48, 64])
def test_shared_prefixes_change_no_bits(tmp_path: Path, columns: int, window: int | None, dtype: str) -> None:
    """Two texts, of which others continue several lengths, next to texts without one; alone and in one batch."""
    attention = (Attention(Rotary(1e4, columns), window), *(Attention(Rotary(1e4, columns)),) * 2)
    model = described(
        tmp_path, "Qwen3's", pooling="last-token", max_positions=LONGEST, head_columns=columns, attention=attention
    )
    encoder, random = make_encoder(model, max_batch_tokens=4096, dtype=dtype), np.random.default_rng(5)
    assert encoder.sharing.tasks == Task.EMBED

    def random_ids(tokens: int) -> npt.NDArray[np.int32]:
        return random.integers(0, model.config.vocab_size, tokens).astype(np.int32)

    texts, prefixes = [random_ids(20), random_ids(300)], [(0, 0), (0, 0)]
    for tokens in (40, 800):
        owner, head = len(texts), random_ids(tokens)
        texts.append(np.concatenate([head, random_ids(5)]))
        prefixes.append((owner, 0))
        for shared, own in ((tokens, 40), (32, 7), (tokens - 8, 1), (40, 100)):
            texts.append(np.concatenate([head[:shared], random_ids(own)]))
            prefixes.append((owner, shared))
    for chosen in (range(2), range(2, 7), range(len(texts))):  # no prefixes; few rows; many
        batch = pack([texts[text] for text in chosen])
        moved = [(prefixes[text][0] - chosen[0], prefixes[text][1]) for text in chosen]
        apart, together = (
            encoder.encode(batch),
            encoder.encode(batch.with_prefixes(np.maximum(moved, 0).astype(np.int32))),
        )
        alone = [encoder.encode(pack([texts[text]]))[0] for text in chosen]
        assert together.tobytes() == apart.tobytes() == np.array(alone).tobytes()
    for wrong in ((0, 12), (0, 304), (2, 8), (1, 296)):
        with pytest.raises(EncoderError, match="sequence 1 cannot continue"):
            encoder.submit(
                dataclasses.replace(pack([random_ids(300), random_ids(30)]), prefixes=np.array([(0, 0), wrong]))
            )
    encoder.close()
