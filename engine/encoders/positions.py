"""Positions: rotary angles, attention biases by distance, and rows of the position table next to padding.

Rotary positions rotate queries and keys. Columns c and c + n/2 of the n rotated columns of a head are a pair. At
position p pair c is rotated by p · θ^(-2c/n). The formulas and their float32 steps are those of transformers
(`modeling_rope_utils.py`); scaling by `Ntk` is that of the remote code that GTE's checkpoints name:
Alibaba-NLP/new-impl, `NTKScalingRotaryEmbedding`.

Relative positions and ALiBi add a bias to every attention score, by head and by distance from query to key. Relative
positions learn it. Distances share biases in buckets, as in T5 and MPNet: each of the nearest distances has its own
bucket, farther ones share buckets by their logarithm. The formula is `MPNetEncoder.relative_position_bucket` of
transformers. ALiBi (Press et al., 2022) fixes it: scores fall with the distance, by one slope for each head.

Disentangled attention has rows of a table instead of biases: distances share them in buckets as
`make_log_bucket_position` of transformers' DeBERTa v2 has it.

Architectures with a `padding_id` treat padding tokens inside a text specially. The rule is
`create_position_ids_from_input_ids` of transformers, for RoBERTa and its descendants: every token whose id is
`pad_token_id` takes the padding's own row of the position table, and positions count only the other tokens. A text that
spells out `<pad>`, or a list of token ids that holds it, is valid input.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import numpy.typing as npt

from embert.engine.models.encoder_config import Disentangled, DynamicNtk, Linear, Llama3, Ntk, Rotary, Yarn

Floats = npt.NDArray[np.float32]

ROTATIONS = 4096  # rows that are computed together


def inverse_frequencies(rotary: Rotary, length: int) -> Floats:
    """The angle of each pair for one position further, in a text of `length` tokens: float32 [columns / 2]."""
    columns, theta, divisor = rotary.columns, rotary.theta, np.float32(1)
    match rotary.scaling:
        case Ntk(factor):
            theta, divisor = theta * factor, np.float32(factor ** (2 / columns))
        case DynamicNtk(factor, trained) if length > trained:
            theta *= (factor * length / trained - (factor - 1)) ** (columns / (columns - 2))
    # Every step is rounded to float32, as transformers' are: at the end of a long text one bit of a frequency is an
    # angle of 5e-4. The power itself is computed in float64, because numpy's float32 one differs between CPUs.
    exponents = np.arange(0, columns, 2, dtype=np.float32) / np.float32(columns)
    powers = (theta ** exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1) / powers / divisor
    match rotary.scaling:
        case Linear(factor):
            return frequencies / np.float32(factor)
        case Llama3():
            return _llama3(frequencies, rotary.scaling)
        case Yarn():
            return _yarn(powers, rotary, rotary.scaling)
    return frequencies


def _llama3(frequencies: Floats, scaling: Llama3) -> Floats:
    """`_compute_llama3_parameters` of transformers, step by step in float32."""
    factor, low, high = (
        np.float32(number) for number in (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor)
    )
    waves = np.float32(2 * math.pi) / frequencies
    is_long = waves > scaling.trained / scaling.low_freq_factor
    is_short = waves < scaling.trained / scaling.high_freq_factor
    low_frequencies = np.where(is_long, frequencies / factor, frequencies)
    smooth = (np.float32(scaling.trained) / waves - low) / (high - low)
    ramp = (np.float32(1) - smooth) * low_frequencies / factor + smooth * low_frequencies
    return cast("Floats", np.where(is_long | is_short, low_frequencies, ramp).astype(np.float32))


def _yarn(powers: Floats, rotary: Rotary, scaling: Yarn) -> Floats:
    """`_compute_yarn_parameters` of transformers, step by step in float32."""
    columns = rotary.columns

    def pair(rotations: float) -> float:
        """Index of the pair that turns this number of times within the trained length."""
        return columns * math.log(scaling.trained / (rotations * 2 * math.pi)) / (2 * math.log(rotary.theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, columns - 1)
    last = last + 0.001 if first == last else last
    ramp = np.clip((np.arange(columns // 2, dtype=np.float32) - np.float32(first)) / np.float32(last - first), 0, 1)
    kept = np.float32(1) - ramp
    divided = np.float32(1) / (np.float32(scaling.factor) * powers)
    return cast("Floats", (divided * (np.float32(1) - kept) + np.float32(1) / powers * kept).astype(np.float32))


def rotations(rotary: Rotary, length: int) -> tuple[Floats, Floats]:
    """Cosines and sines of the angles at each position of a text of `length` tokens: float32 [length, columns / 2]."""
    frequencies = inverse_frequencies(rotary, length)
    cosines, sines = (np.empty((length, len(frequencies)), np.float32) for _ in range(2))
    positions = np.arange(length, dtype=np.float32)[:, None]
    for start in range(0, length, ROTATIONS):  # float64 needs twice the memory of the result
        rows = slice(start, start + ROTATIONS)
        # The angles are rounded to float32, as where models were trained.
        angles = (positions[rows] * frequencies).astype(np.float64)
        cosines[rows], sines[rows] = np.cos(angles), np.sin(angles)
    if isinstance(rotary.scaling, Yarn):
        factor = np.float32(rotary.scaling.attention_factor)
        cosines, sines = cosines * factor, sines * factor
    return cosines, sines


FARTHEST = 128  # distances from here on share a bucket


def bias_by_distance(weight: npt.NDArray[np.float32], longest: int) -> npt.NDArray[np.float32]:
    """[buckets, heads] → [heads, 2 · longest - 1]: column c holds the bias of distance c - (longest - 1).

    A distance is the key's position minus the query's.
    """
    distances = np.arange(1 - longest, longest)
    return np.ascontiguousarray(weight[buckets(distances, len(weight))].T)


def alibi_by_distance(heads: int, longest: int) -> npt.NDArray[np.float32]:
    """Biases of ALiBi like `bias_by_distance`: [heads, 2 · longest - 1]. Both directions count alike."""
    distances = np.abs(np.arange(1 - longest, longest, dtype=np.float64))
    return (-_slopes(heads)[:, None] * distances).astype(np.float32)


def _slopes(heads: int) -> npt.NDArray[np.float64]:
    """2^(-8/n), 2^(-16/n), … for n heads, a power of two. Of other numbers the paper's code takes the rest from 2n."""
    power = 1 << heads.bit_length() - 1
    first = 2.0 ** (-8 / power * np.arange(1, power + 1))
    more = 2.0 ** (-4 / power * np.arange(1, 2 * power + 1, 2))
    slopes: npt.NDArray[np.float64] = np.concatenate([first, more[: heads - power]])
    return slopes


def buckets(distances: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Distance → bucket of `count`: the first half for keys before the query, the second half for keys after it."""
    half = count // 2
    near = half // 2  # each of these distances has its bucket
    far = np.abs(distances)
    # The model was trained with float32 logarithms, and the borders of buckets depend on their rounding. numpy's own
    # float32 logarithm differs between CPUs; its float64 one, rounded to float32, does not.
    logarithms = np.log(np.maximum(far, 1) / near).astype(np.float32)
    steps = logarithms / np.float32(math.log(FARTHEST / near)) * np.float32(half - near)
    bucket: npt.NDArray[np.int64] = np.where(far < near, far, np.minimum(near + steps.astype(np.int64), half - 1))
    bucket[distances > 0] += half
    return bucket


def relative_rows(disentangled: Disentangled, longest: int) -> npt.NDArray[np.int64]:
    """The row of the table for each distance: [2 · longest - 1], column c for distance c - (longest - 1).

    A distance is the key's position minus the query's.
    """
    distances, span = np.arange(longest - 1, -longest, -1), disentangled.span  # the query's minus the key's
    if disentangled.buckets:
        distances = log_buckets(distances, disentangled.buckets, disentangled.farthest)
    return np.clip(distances + span, 0, 2 * span - 1)


def log_buckets(distances: npt.NDArray[np.int64], count: int, farthest: int) -> npt.NDArray[np.int64]:
    """Distance → bucket, of the same sign: up to `count` / 2 itself, and on to `count` - 1 by the logarithm."""
    near, far = count // 2, np.abs(distances)
    # As in `buckets`, every step is rounded to float32, and the logarithm itself is the same on every CPU.
    ratios = np.maximum(far, near).astype(np.float32) / np.float32(near)
    last = np.float32(np.log(np.float64(np.float32((farthest - 1) / near))))
    steps = np.log(ratios.astype(np.float64)).astype(np.float32) / last * np.float32(near - 1)
    logarithmic = np.ceil(steps).astype(np.int64) + near
    return np.where(far <= near, distances, np.sign(distances) * logarithmic)


def padding_positions(
    ids: npt.NDArray[np.int32], cu_seqlens: npt.NDArray[np.int32], padding_id: int | None, padding_row: int
) -> npt.NDArray[np.int32] | None:
    """Returns each token's row of the position table, int32 [T]; None if no token is padding, as in nearly every batch.

    `ids` is [T] and `cu_seqlens` [B + 1]. Padding tokens take the row `padding_row`. Sequences start at row 0.
    """
    if padding_id is None:
        return None
    is_padding = ids == padding_id
    if not is_padding.any():
        return None
    counts = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(~is_padding, out=counts[1:])  # tokens before each that are not padding
    lengths = np.diff(cu_seqlens)
    positions = counts[:-1] - np.repeat(counts[cu_seqlens[:-1]], lengths)
    positions[is_padding] = padding_row
    return positions.astype(np.int32)
