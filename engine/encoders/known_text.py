"""One text whose vector is known: computed here with the checkpoint's weights in numpy, and by the encoder that starts.

An encoder whose kernels are another GPU's, do nothing, or read the wrong weights still answers with vectors, and nobody
can tell from their shape. So it is asked once before it serves. The reference shares no code with it: it is BERT's
definition, a text at a time, in float32.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from embert.engine.checkpoint import RELATIVE, Checkpoint
from embert.engine.config import EncoderConfig
from embert.engine.encoders.relative_positions import scores_by_distance

__all__ = ["disagreement", "known_text", "vector_of"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

LENGTH = 5
# Relative errors that no rounding makes: float16's is about 1e-3 here, bfloat16's 1e-2. Kernels that do not run, or run
# on other weights, miss by the vector's own length.
TOLERANCE = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.3}

_erf = np.frompyfunc(math.erf, 1, 1)


def known_text(config: EncoderConfig) -> Ints:
    """A few tokens from all over the vocabulary, none of them padding: int32 [L]."""
    length = min(LENGTH, config.max_positions)
    ids = (np.arange(length) * 2 + 1) * config.vocab_size // (2 * length)
    if config.padding_id is not None:
        ids[ids == config.padding_id] = 0 if config.padding_id > 0 else config.vocab_size - 1
    return ids.astype(np.int32)


def vector_of(ids: Ints, config: EncoderConfig, checkpoint: Checkpoint, pooling: str) -> Floats:
    """The pooled last hidden state of a text of token ids [L], not normalised: float32 [hidden]."""
    tensor = checkpoint.float32

    def row(name: str, of: npt.NDArray[np.signedinteger] | slice) -> Floats:
        stored = checkpoint.stored(name)
        return type(stored)(stored.array[of], stored.dtype).float32()  # of a large table only what is read

    def linear(x: Floats, name: str) -> Floats:
        y: Floats = x @ tensor(f"{name}.weight").T + tensor(f"{name}.bias")
        return y

    def norm(x: Floats, name: str) -> Floats:
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt(np.square(centred).mean(-1, keepdims=True) + np.float32(config.layer_norm_eps))
        y: Floats = centred / scale * tensor(f"{name}.weight") + tensor(f"{name}.bias")
        return y

    length, heads, size = len(ids), config.heads, config.head_size
    nearness: Floats | None = None
    if config.relative_buckets:
        places = np.arange(length)
        by_distance = scores_by_distance(tensor(RELATIVE), length)
        nearness = by_distance[:, places - places[:, None] + length - 1]
    x = row("embeddings.word_embeddings.weight", ids)
    x = x + row("embeddings.position_embeddings.weight", slice(length))
    x = norm(x + row("embeddings.token_type_embeddings.weight", slice(1)), "embeddings.LayerNorm")
    for layer in range(config.layers):
        at = f"encoder.layer.{layer}."
        q, k, v = (
            linear(x, f"{at}attention.self.{name}").reshape(length, heads, size).swapaxes(0, 1)
            for name in ("query", "key", "value")
        )
        scores = q @ k.swapaxes(1, 2) / np.float32(math.sqrt(size))
        if nearness is not None:
            scores = scores + nearness
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        context = (weights @ v).swapaxes(0, 1).reshape(length, -1)
        x = norm(x + linear(context, f"{at}attention.output.dense"), f"{at}attention.output.LayerNorm")
        inner = _activated(linear(x, f"{at}intermediate.dense"), config.activation)
        x = norm(x + linear(inner, f"{at}output.dense"), f"{at}output.LayerNorm")
    pooled: Floats = {
        "cls": lambda: x[0],
        "mean": lambda: x.mean(0),
        "max": lambda: x.max(0),
        "last-token": lambda: x[-1],
    }[pooling]()
    return pooled.astype(np.float32, copy=False)


def disagreement(got: Floats, expected: Floats, dtype: str) -> str | None:
    """Why `got` [hidden] cannot be the vector that is `expected`, in half a sentence; None where it can."""
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
    else:
        curve = np.tanh(math.sqrt(2 / math.pi) * (x + np.float32(0.044715) * x**3))
    y: Floats = np.float32(0.5) * x * (np.float32(1) + curve)
    return y
