"""Layers of heads in numpy, compared with torch's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from embert.engine.heads.embedding import ACTIVATIONS

TORCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    x = np.concatenate([np.linspace(-12, 12, 4801), [-1e30, -300, -0.0, 0.0, 300, 1e30]]).astype(np.float32)
    with np.errstate(over="ignore"):  # the cube of 1e30
        found = ACTIVATIONS[name](x)
    assert found.dtype == np.float32
    wanted = TORCH[name](torch.from_numpy(x).double()).numpy()
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-6)
