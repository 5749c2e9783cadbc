"""A self-test: one text whose vector numpy computes here, to compare with the vector of an encoder that starts.

An encoder whose kernels are built for another GPU, do nothing, or read the wrong weights still answers with vectors of
the right shape. This test finds it before it serves. The reference shares no code with the encoder: it is the
architecture's definition, one text at a time, in float32.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from embert.engine.checkpoint import Checkpoint
from embert.engine.encoders.relative_positions import bias_by_distance
from embert.engine.families.architecture import Architecture
from embert.engine.families.tensor_names import (
    POSITION_EMBEDDINGS,
    RELATIVE_ATTENTION_BIAS,
    TOKEN_TYPE_EMBEDDINGS,
    WORD_EMBEDDINGS,
)

__all__ = ["disagreement", "known_text", "vector_of"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

LENGTH = 5
# Relative errors far above rounding, which is about 1e-3 in float16 and 1e-2 in bfloat16. Kernels that do not run, or
# run on other weights, are off by the vector's own length.
TOLERANCE = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.3}

_erf = np.frompyfunc(math.erf, 1, 1)


def known_text(architecture: Architecture) -> Ints:
    """A few tokens spread over the vocabulary, none of them padding: int32 [L]."""
    length = min(LENGTH, architecture.max_positions)
    ids = (np.arange(length) * 2 + 1) * architecture.vocab_size // (2 * length)
    if architecture.padding_id is not None:
        ids[ids == architecture.padding_id] = 0 if architecture.padding_id > 0 else architecture.vocab_size - 1
    return ids.astype(np.int32)


def vector_of(ids: Ints, architecture: Architecture, checkpoint: Checkpoint, pooling: str) -> Floats:
    """The pooled last hidden state of token ids [L], not normalised: float32 [hidden]."""
    tensor = checkpoint.float32

    def row(name: str, of: npt.NDArray[np.signedinteger] | slice) -> Floats:
        stored = checkpoint.stored(name)
        return type(stored)(stored.array[of], stored.dtype).float32()  # converts only the rows that are read

    def linear(x: Floats, name: str) -> Floats:
        y: Floats = x @ tensor(f"{name}.weight").T + tensor(f"{name}.bias")
        return y

    def norm(x: Floats, name: str) -> Floats:
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt(np.square(centred).mean(-1, keepdims=True) + np.float32(architecture.layer_norm_eps))
        y: Floats = centred / scale * tensor(f"{name}.weight") + tensor(f"{name}.bias")
        return y

    length, heads, size = len(ids), architecture.heads, architecture.head_size
    bias: Floats | None = None  # [heads, queries, keys]
    if architecture.relative_buckets:
        positions = np.arange(length)
        by_distance = bias_by_distance(tensor(RELATIVE_ATTENTION_BIAS), length)
        bias = by_distance[:, positions - positions[:, None] + length - 1]
    x = row(WORD_EMBEDDINGS, ids)
    x = x + row(POSITION_EMBEDDINGS, slice(length))
    x = norm(x + row(TOKEN_TYPE_EMBEDDINGS, slice(1)), "embeddings.LayerNorm")
    for layer in range(architecture.layers):
        at = f"encoder.layer.{layer}."
        q, k, v = (
            linear(x, f"{at}attention.self.{name}").reshape(length, heads, size).swapaxes(0, 1)
            for name in ("query", "key", "value")
        )
        scores = q @ k.swapaxes(1, 2) / np.float32(math.sqrt(size))
        if bias is not None:
            scores = scores + bias
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        context = (weights @ v).swapaxes(0, 1).reshape(length, -1)
        x = norm(x + linear(context, f"{at}attention.output.dense"), f"{at}attention.output.LayerNorm")
        inner = _activated(linear(x, f"{at}intermediate.dense"), architecture.activation)
        x = norm(x + linear(inner, f"{at}output.dense"), f"{at}output.LayerNorm")
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


def _activated(x: Floats, activation: str) -> Floats:
    if activation == "relu":
        return np.maximum(x, np.float32(0))
    if activation == "gelu":
        curve = _erf(x / math.sqrt(2)).astype(np.float32)
    else:  # the tanh approximation of Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016
        curve = np.tanh(math.sqrt(2 / math.pi) * (x + np.float32(0.044715) * x**3))
    y: Floats = np.float32(0.5) * x * (np.float32(1) + curve)
    return y
