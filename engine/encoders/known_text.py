"""A self-test: one text whose vector numpy computes here, to compare with the vector of an encoder that starts.

An encoder whose kernels are built for another GPU, do nothing, or read the wrong weights still answers with vectors of
the right shape. This test finds it before it serves. The other side of the comparison is reference.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embert.engine.checkpoint import Checkpoint
from embert.engine.encoders.reference import hidden_state
from embert.engine.models.encoder_config import EncoderConfig

__all__ = ["disagreement", "known_text", "spread_ids", "vector_of"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

LENGTH = 5
PAST_WINDOW = 16  # tokens
# Relative errors far above rounding, which is about 1e-3 in float16 and 1e-2 in bfloat16. Kernels that do not run, or
# run on other weights, are off by the vector's own length.
TOLERANCE = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.3, "int8": 0.3}


def known_text(architecture: EncoderConfig) -> Ints:
    """A few tokens spread over the vocabulary, none of them padding: int32 [L]. No window holds them all."""
    windows = (architecture.attention_of(layer).window for layer in range(architecture.layers))
    widest = max((window + PAST_WINDOW for window in windows if window is not None), default=0)
    return spread_ids(architecture, max(LENGTH, widest))


def spread_ids(architecture: EncoderConfig, length: int) -> Ints:
    """So many tokens, or as many as the model reads, spread over the vocabulary, none of them padding: int32 [L]."""
    length = min(length, architecture.max_positions)
    ids = (np.arange(length) * 2 + 1) * architecture.vocab_size // (2 * length)
    if architecture.padding_id is not None:
        ids[ids == architecture.padding_id] = 0 if architecture.padding_id > 0 else architecture.vocab_size - 1
    return ids.astype(np.int32)


def vector_of(
    ids: Ints, architecture: EncoderConfig, checkpoint: Checkpoint, pooling: str, adapter: int = -1
) -> Floats:
    """The pooled last hidden state of token ids [L] with an adapter, -1: none. Not normalised: float32 [hidden]."""
    x = hidden_state(ids, architecture, checkpoint, adapter)
    pooled: Floats = {
        "cls": lambda: x[0],
        "mean": lambda: x.mean(0),
        "max": lambda: x.max(0),
        "last-token": lambda: x[-1],
    }[pooling]()
    return pooled.astype(np.float32, copy=False)


def disagreement(got: Floats, expected: Floats, dtype: str) -> str | None:
    """Why `got` [hidden] cannot be the `expected` vector, in half a sentence; None if it can."""
    if not np.isfinite(got).all():
        return "its vector is not finite"
    if not got.any():
        return "its vector is all zeros"
    length = float(np.linalg.norm(expected))
    error = float(np.linalg.norm(got - expected)) / max(length, 1e-12)
    if error <= TOLERANCE[dtype]:
        return None
    return f"its vector is {error:.2g} of its length off, at most {TOLERANCE[dtype]:g} is rounding"
