"""References of all kernels in float64 numpy, slow and plain; storage types in numpy; random inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Doubles = npt.NDArray[np.float64]

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2
DTYPES = (FLOAT16, BFLOAT16, FLOAT32)
NONE, GELU, GELU_TANH, RELU, SILU = 0, 1, 2, 3, 4
CLS, MEAN, MAX, LAST = 0, 1, 2, 3
ATTENTION_ROWS, ATTENTION_SHORT = 64, 32
KEEPS_LENGTH = 1 << 31
LENGTHS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512]  # awkward ones
ALLOWED = 1.2  # times the error of one rounding


def stored(x: npt.NDArray[Any], dtype: int) -> npt.NDArray[Any]:
    """Round to a storage type: float32, float16, or bfloat16 as uint16."""
    if dtype == FLOAT32:
        return x.astype(np.float32)
    if dtype == FLOAT16:
        return x.astype(np.float16)
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def exact(x: npt.NDArray[Any]) -> Doubles:
    """A stored array's values."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def error(got: npt.NDArray[Any], wanted: Doubles) -> float:
    """Relative Frobenius error; NaN where anything is NaN."""
    return float(np.linalg.norm(exact(got) - wanted)) / max(float(np.linalg.norm(wanted)), 1e-30)


def row_errors(got: npt.NDArray[np.floating], wanted: npt.NDArray[np.floating]) -> Doubles:
    """Error of each row, relative to the length of the expected one. Infinite if a value is not finite."""
    found: Doubles = np.linalg.norm(got - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    return np.nan_to_num(found, nan=np.inf)


def rounding(wanted: Doubles, dtype: int) -> float:
    """The error that one rounding of the exact result costs."""
    return error(stored(wanted, dtype), wanted)


def allowed(wanted: Doubles, dtype: int) -> float:
    return ALLOWED * rounding(wanted, dtype) if dtype != FLOAT32 else 1e-6


def drawn(
    random: np.random.Generator, shape: tuple[int, ...], dtype: int, scale: float = 1.0
) -> npt.NDArray[np.generic]:
    return stored(random.standard_normal(shape) * scale, dtype)


def with_outliers(x: npt.NDArray[np.float64], random: np.random.Generator) -> npt.NDArray[np.float64]:
    x[:, random.integers(0, x.shape[1], 3)] *= 50
    return x


def layernorm(x: Doubles, gamma: Doubles, beta: Doubles, epsilon: float) -> Doubles:
    centered = x - x.mean(axis=1, keepdims=True)
    y: Doubles = centered / np.sqrt((centered**2).mean(axis=1, keepdims=True) + epsilon) * gamma + beta
    return y


def group_sums(x: Doubles, parts: int = 1) -> Doubles:
    """Sums and sums of squares of rows' groups of 128 columns, each in `parts`: [T, groups · parts, 2]."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % 128)))
    pieces = padded.reshape(len(x), padded.shape[1] * parts // 128, 128 // parts)
    return np.stack([pieces.sum(axis=2), np.square(pieces).sum(axis=2)], axis=2)


def erf(x: Doubles) -> Doubles:
    y: Doubles = torch.erf(torch.from_numpy(x)).numpy()
    return y


def activation(x: Doubles, kind: int) -> Doubles:
    y = x
    if kind == GELU:
        y = 0.5 * x * (1 + erf(x / np.sqrt(2)))
    elif kind == GELU_TANH:
        y = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    elif kind == RELU:
        y = np.maximum(x, 0)
    elif kind == SILU:
        y = x / (1 + np.exp(-x))
    return y


def attention(
    qkv: Doubles,
    lengths: list[int],
    heads: int,
    relative: Doubles | None = None,
    window: int = 0,
    *,
    kv_heads: int = 0,
    scale: float = 0.0,
    causal: bool = False,
) -> Doubles:
    """qkv [T, (heads + 2·kv_heads)·d] → [T, heads·d].

    relative [heads, 2·longest - 1] by key - query + longest - 1. kv_heads 0: as many as heads; scale 0: 1/√d.
    """
    tokens, width = qkv.shape
    kv_heads = kv_heads or heads
    dim = width // (heads + 2 * kv_heads)
    hidden = heads * dim
    out = np.empty((tokens, hidden))
    start = 0
    for length in lengths:
        rows = qkv[start : start + length].reshape(length, heads + 2 * kv_heads, dim).transpose(1, 0, 2)
        queries, keys, values = np.split(rows, [heads, heads + kv_heads])
        keys, values = (np.repeat(each, heads // kv_heads, axis=0) for each in (keys, values))
        scores = queries @ keys.transpose(0, 2, 1) * (scale or 1 / np.sqrt(dim))
        positions = np.arange(length)
        if window:
            scores[:, abs(positions - positions[:, None]) > window] = -np.inf
        if causal:
            scores[:, positions > positions[:, None]] = -np.inf
        if relative is not None:
            scores += relative[:, positions - positions[:, None] + relative.shape[1] // 2]
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        out[start : start + length] = (weights @ values).transpose(1, 0, 2).reshape(length, hidden)
        start += length
    return out


def relative_table(relative: npt.NDArray[np.float32], dim: int) -> tuple[npt.NDArray[np.float32], int]:
    """Input of the kernels for `relative` scores of heads of size `dim`, and its reach; NaN where it is spare."""
    heads, columns = relative.shape
    longest = columns // 2 + 1
    reach = -(-longest // ATTENTION_ROWS) * ATTENTION_ROWS
    table = np.full((heads, 2 * reach), np.nan, np.float32)
    table[:, reach - longest + 1 : reach + longest] = relative * np.float32(np.sqrt(dim))
    return table, reach


def pool(states: Doubles, lengths: list[int], kind: int, cuts: list[int]) -> Doubles:
    out = np.zeros((len(lengths), states.shape[1]))
    start = 0
    for i, (length, cut) in enumerate(zip(lengths, cuts, strict=True)):
        rows = states[start : start + length]
        vector = {CLS: rows[0], MEAN: rows.mean(axis=0), MAX: rows.max(axis=0), LAST: rows[-1]}[kind].copy()
        kept = cut & ~KEEPS_LENGTH
        if kept:
            vector[kept:] = 0
        if not cut & KEEPS_LENGTH:
            vector /= max(float(np.linalg.norm(vector)), 1e-12)
        out[i] = vector
        start += length
    return out


def tiles(lengths: list[int]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The attention's work lists [n, 4] {first row, length, query, 0}: of long sequences, of short ones."""
    long, short, start = [], [], 0
    for length in lengths:
        if length <= ATTENTION_SHORT:
            short.append((start, length, 0, 0))
        else:
            long += [(start, length, query, 0) for query in range(0, length, ATTENTION_ROWS)]
        start += length
    return np.array(long, np.int32).reshape(-1, 4), np.array(short, np.int32).reshape(-1, 4)


def tiles_of_prefixes(
    lengths: list[int], shared: list[tuple[int, int]]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The work lists where texts continue prefixes {first row, tokens}, and the prefix of each tile."""
    long: list[tuple[int, ...]] = []
    short: list[tuple[int, ...]] = []
    prefixes: list[tuple[int, int]] = []
    start = 0
    for length, (row, tokens) in zip(lengths, shared, strict=True):
        whole = tokens + length
        if whole <= ATTENTION_SHORT:
            short.append((start, whole, 0, 0))
        else:
            for query in range(tokens, whole, ATTENTION_ROWS):
                long.append((start - tokens, whole, query, 0))
                prefixes.append((row, tokens))
        start += length
    arrays = (np.array(long), np.array(short).reshape(-1, 4), np.array(prefixes))
    return tuple(array.astype(np.int32) for array in arrays)  # type: ignore[return-value]
