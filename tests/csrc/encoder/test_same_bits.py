"""The same text has the same bits, whatever it is batched with and however often it is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embert import engine
from embert.engine.encoders.cuda.encoder import CudaEncoder
from tests.csrc.encoder.random_models import NARROW, packed, part, random_bert

pytestmark = pytest.mark.gpu


def test_a_text_is_batch_invariant(encoder: CudaEncoder, random: np.random.Generator) -> None:
    lengths = np.concatenate([[1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 128, 129, 511, 512], random.integers(1, 200, 50)])
    batch = packed(random, lengths)
    everyone = np.arange(len(lengths))
    together = encoder.encode(part(batch, everyone))
    for _ in range(30):
        rows = random.permutation(everyone)[: int(random.integers(1, len(everyone) + 1))]
        assert (encoder.encode(part(batch, rows)) == together[rows]).all()
    for row in everyone:
        assert (encoder.encode(part(batch, everyone[row : row + 1])) == together[row]).all()


def test_a_narrow_model_is_batch_invariant(tmp_path: Path, random: np.random.Generator) -> None:
    ours = CudaEncoder(engine.load_model(str(random_bert(tmp_path, **NARROW))), max_batch_tokens=40_000)
    batch = packed(random, random.integers(1, 300, 230))  # some 34 000 tokens
    everyone = np.arange(230)
    together = ours.encode(part(batch, everyone))
    for count in (1, 5, 60, 90, 100, 110, 115, 120, 130, 150, 180, 200, 220):
        rows = random.permutation(everyone)[:count]
        first = ours.encode(part(batch, rows))
        assert (first == together[rows]).all(), count
        assert all((ours.encode(part(batch, rows)) == first).all() for _ in range(20))
    ours.close()
