"""A checkpoint of every model_type through the CUDA encoder's host side, whose kernels are replaced by ones on the CPU.

What these tests check is the way from a model's config.json and tensor names to the program, with adapters added to
the weights. The sums are not those of a GPU's kernels: test_models_on_gpu.py has these.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from embert.engine.encoders.cuda.adapters import parts_of
from tests.csrc.model_checkpoints import ModelCheckpoint, check_rounding, model_checkpoint
from tests.csrc.reference import FLOAT16, FLOAT32, row_errors
from tests.csrc.test_computed_forwards import HOPPER, PORTABLE, computed, program
from tests.oracles.model_cases import CHECKPOINTS

__all__ = ["program"]  # a fixture

pytestmark = pytest.mark.timeout(600)  # compilers, on cores that others may use

LENGTHS = [1, 2, 17, 32, 33, 65, 5, 40, 9]


def vectors(program: Path, of: ModelCheckpoint, gemm: str, dtype: int) -> npt.NDArray[np.float32]:
    """Pooled, of all texts: a program for each adapter, as the extension has an encoder for each."""
    found = np.empty((of.batch.sequences, of.model.config.hidden_size), np.float32)
    for part in parts_of(of.batch):
        _, pooled = computed(program, of.model, gemm, dtype, part.batch, part.adapter)
        found[slice(None) if part.sequences is None else part.sequences] = pooled
    return found


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_vectors_are_those_of_transformers_class(program: Path, tmp_path: Path, name: str) -> None:
    of = model_checkpoint(tmp_path, name, LENGTHS)
    if of.model.config.disentangled is None:
        assert row_errors(vectors(program, of, PORTABLE, FLOAT32), of.pooled(torch.float64)).max() <= 1e-5
    else:  # runs in 16 bits only
        check_rounding(vectors(program, of, PORTABLE, FLOAT16), of, folded=False)
    check_rounding(vectors(program, of, HOPPER, FLOAT16), of)


def test_disentangled_attention_of_first_rows_only(program: Path, tmp_path: Path) -> None:
    """The rest of the last layer processes no others with cls pooling."""
    of = model_checkpoint(tmp_path, "deberta-v2", [65, 40, 33, 5])
    of = dataclasses.replace(of, model=dataclasses.replace(of.model, pooling="cls"))
    first = np.stack([rows[0] for rows in of.states(torch.float64)])
    assert row_errors(vectors(program, of, HOPPER, FLOAT16), first).max() <= 5e-3


def test_disentangled_attention_in_float32_is_refused(program: Path, tmp_path: Path) -> None:
    of = model_checkpoint(tmp_path, "deberta-v2", [5])
    with pytest.raises(AssertionError, match="disentangled attention in float32"):
        vectors(program, of, PORTABLE, FLOAT32)
