"""Few kernels, all made at load: what keeps the CPU encoder's memory where it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.encoders.torch_linear import kernel_rows, row_counts

ENCODE = """
import sys
import numpy as np
import engine
encoder = engine.load_encoder(engine.load_model(), device="cpu", dtype=sys.argv[1])
print("loaded", flush=True)
random = np.random.default_rng(0)
for most in [1, 2, 5, 20, 200] * 12:
    lengths = random.integers(1, 40, random.integers(1, most + 1)).tolist() + [256] * int(random.integers(0, 3))
    lengths += random.integers(60, 257, random.integers(0, 4)).tolist()
    sequences = [np.full(length, 2000, np.int32) for length in lengths]
    while sum(map(len, sequences)) > encoder.max_batch_tokens:
        sequences.pop()
    encoder.encode(engine.pack(sequences))
print("encoded", flush=True)
"""


def test_numbers_of_rows() -> None:
    for rows in range(1, 2000):
        assert rows <= kernel_rows(rows) <= max(rows + 7, 1.13 * rows)
    assert list(row_counts(300)) == sorted({kernel_rows(rows) for rows in range(1, 301)})
    assert list(row_counts(1)) == [8]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_kernel_is_made_after_loading(dtype: str) -> None:
    """oneDNN says so itself, and what it makes later it would make for ever: its caches would be too small."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        pytest.skip("this torch has no oneDNN")
    done = subprocess.run(
        [sys.executable, "-c", ENCODE, dtype],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"ONEDNN_VERBOSE": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    loading, _, encoding = done.stdout.partition("\nloaded\n")
    assert "encoded" in encoding
    if "inner_product" not in loading:
        pytest.skip("oneDNN's packed products do not work on this machine")
    assert "inner_product" in encoding
    assert "create:cache_miss" not in encoding
