"""Our own kernels for CPUs (csrc/cpu/) on numpy's arrays, in float32: linear layers, norms, attention.

Results are batch-invariant: the order of each sum depends only on the row's own columns or its own sequence.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from embert.engine.encoders.cpu.positions import Positions
from embert.engine.encoders.cpu.runs import Group, allowed_threads
from embert.engine.errors import UnsupportedModel
from embert.engine.quantization.rows import QuantizedWeight

Activation = Literal["none", "gelu", "gelu_tanh", "relu", "silu"]
Floats = npt.NDArray[np.float32]
Norm = tuple[Floats, Floats | None, float]  # gamma, beta, epsilon; without beta it is an RMSNorm

log = logging.getLogger(__name__)


def _import_kernels() -> ModuleType | None:
    """The kernels; None where embert was installed without a C++ compiler, or for another processor."""
    try:
        return importlib.import_module("embert.engine._cpu")
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        log.warning("embert's kernels for CPUs cannot be loaded, so torch's are used: %s", error)
        return None


_cpu = _import_kernels()


@functools.lru_cache(maxsize=1)
def _select(limit: str) -> str:
    """Select kernels; return the name of their instruction set, "" if this CPU has no kernels.

    Only the last selection is remembered, because it is the one that counts.
    """
    names = _kernels().instruction_sets()
    if limit and limit not in names:
        raise UnsupportedModel(f"EMBERT_CPU_ISA is {limit!r}; supported: {', '.join(names)}")
    return str(_kernels().select(limit))


def instruction_set() -> str | None:
    """Instruction set of the kernels on this CPU, None if it has no kernels or they are not installed.

    EMBERT_CPU_ISA selects a smaller one.
    """
    return None if _cpu is None else _select(os.environ.get("EMBERT_CPU_ISA", "")) or None


def kernels_name() -> str:
    """Name of the instruction set in the start-up log."""
    return (instruction_set() or "").replace("AVX512", "AVX-512").replace("_", " ").replace("DOT", "dot product")


def lanes() -> int:
    """Floats in a register."""
    return int(_kernels().lanes())


def _address(array: Any | None) -> int:
    """The address of contiguous elements. ctypes finds it in a quarter of the time of `array.ctypes`."""
    return 0 if array is None else ctypes.addressof(_Bytes.from_buffer(array))


_Bytes = ctypes.c_char * 0


def _new_rows(rows: int, columns: int) -> Floats:
    """Memory for rows that begins with a cache line, which numpy does not promise."""
    memory = np.empty(rows * columns + 16, np.float32)
    offset = -_address(memory) % 64 // 4
    return memory[offset : offset + rows * columns].reshape(rows, columns)


class KernelLinear:
    """activation(x · weightᵀ + bias + residual) · gate, in float32."""

    def __init__(self, layer: Any, outputs: int, activation: Activation) -> None:
        """`layer` is one of `_cpu`."""
        self.layer, self.activation, self.outputs = layer, _kernels().activation(activation), outputs

    def __call__(self, x: Floats, residual: Floats | None = None, gate: Floats | None = None) -> Floats:
        """[T, in] → [T, out]. `residual` and `gate` are [T, out], contiguous, and are not changed."""
        x = np.ascontiguousarray(x)
        y = _new_rows(len(x), self.outputs)
        addresses = _address(residual), _address(gate)
        self.layer(_address(x), len(x), _address(y), self.activation, *addresses, allowed_threads())
        return y


def linear(weight: Floats, bias: Floats | None = None, activation: Activation = "none") -> KernelLinear:
    """A linear layer: `weight` is float32 [out, in] and `bias` float32 [out]."""
    outputs = len(weight)
    bias = np.zeros(outputs, np.float32) if bias is None else np.ascontiguousarray(bias)
    return KernelLinear(_kernels().linear(np.ascontiguousarray(weight), bias), outputs, activation)


def int8_linear(weights: Sequence[QuantizedWeight], bias: Floats, activation: Activation = "none") -> KernelLinear:
    """An int8 linear layer with the integers that quantization/ defines; `weights` are concatenated."""
    integers = np.concatenate([weight.integers for weight in weights])
    scales = np.concatenate([weight.scales for weight in weights])
    return KernelLinear(_kernels().int8_linear(integers, scales, bias), len(bias), activation)


class KernelLayer:
    """A whole layer in one call, where norms follow the residuals and nothing gates: BERT's, and others like it."""

    def __init__(self, linears: Sequence[KernelLinear], norms: Sequence[Norm], heads: int) -> None:
        """`linears` are those of query, key and value, of the projection, and the inner and the outer one, with their
        activations; `norms` follow attention and the feed-forward network."""
        self._layer = _kernels().Layer(*(linear.layer for linear in linears), linears[2].activation, *norms, heads)

    def __call__(self, x: Floats, groups: Sequence[Group], positions: Positions) -> Floats:
        """[T, hidden] → [T, hidden]. `groups` cover all rows in order; positions have no rotation."""
        y = _new_rows(*x.shape)
        bias, window = positions.bias, -1 if positions.window is None else positions.window
        plain = [group[:4] for group in groups]  # only decoders have prefixes
        self._layer(_address(x), len(x), plain, _address(bias), _longest(bias), window, _address(y), allowed_threads())
        return y


def _longest(by_distance: npt.NDArray[Any] | None) -> int:
    """Length of the longest sequence whose distances are the columns of [..., 2 · longest - 1]."""
    return 0 if by_distance is None else (by_distance.shape[-1] + 1) // 2


def apply_norm(x: Floats, norm: Norm) -> Floats:
    """LayerNorm, or without beta RMSNorm, of float32 [T, columns]."""
    x, (gamma, beta, epsilon) = np.ascontiguousarray(x), norm
    y = _new_rows(*x.shape)
    addresses = _address(gamma), _address(beta)
    _kernels().normalize(_address(x), *x.shape, *addresses, epsilon, _address(y), allowed_threads())
    return y


class KernelEmbeddings:
    """Rows of two tables, their sums and the sums' norm, in one call."""

    def __init__(self, words: Floats, positions: Floats, norm: Norm) -> None:
        """The tables are float32 [rows, columns]. The norm has a beta."""
        self._tables = words, positions
        self._gamma, self._beta, self._epsilon = norm

    def __call__(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Floats:
        """[T] each, contiguous → float32 [T, columns]. Raises IndexError for an id outside its table."""
        y = _new_rows(len(ids), len(self._gamma))
        norm = _address(self._gamma), _address(self._beta), self._epsilon
        _kernels().embed(
            _address(ids), _address(positions), len(ids), *self._tables, *norm, _address(y), allowed_threads()
        )
        return y


def means(hidden: Floats, groups: Sequence[Group]) -> Floats:
    """The mean of each sequence's rows: contiguous float32 [T, columns] → [n, columns]."""
    columns, done = hidden.shape[1], 0
    y = np.empty((sum(group.sequences for group in groups), columns), np.float32)
    rows, to = _address(hidden), _address(y)
    for start, sequences, length, *_ in groups:
        source = rows + 4 * start * columns
        _kernels().mean(source, sequences, length, columns, to + 4 * done * columns, allowed_threads())
        done += sequences
    return y


def attend(
    qkv: Floats, group: Group, heads: int, positions: Positions, context: Floats, decoder: tuple[bool, int] = (False, 0)
) -> None:
    """Attention of one group of sequences: float32 [T, (heads + 2 · kv_heads) · size] → its rows of `context`, whole.

    Heads are whole registers. `decoder`: queries attend to no later key; kv_heads, 0 for as many as `heads`. Only such
    groups have prefixes.
    """
    start, sequences, length, keys, *prefix = group
    whole = length + group.prefix
    rotation = None if positions.rotation is None else positions.rotation(whole)  # keeps the tables until the end
    bias, window = positions.bias, -1 if positions.window is None else positions.window
    _kernels().attend(
        _address(qkv),
        start,
        sequences,
        length,
        keys or whole,
        heads,
        context.shape[1] // heads,
        _address(context),
        *((0, 0, 0) if rotation is None else (*map(_address, rotation), rotation[0].shape[1])),
        _address(bias),
        _longest(bias),
        window,
        allowed_threads(),
        *((*decoder, *prefix) if group.prefix else decoder if any(decoder) else ()),
    )


class DistanceRows:
    """Factors of queries and keys for each row of a table of distances, for `attend_by_distance`."""

    def __init__(self, of_queries: Floats | None, of_keys: Floats | None, row_of: npt.NDArray[np.int64]) -> None:
        """The first two are float32 [heads, rows, size], one of them at least; `row_of` is that of relative_rows."""
        self.of_queries, self.of_keys = (None if part is None else _as_columns(part) for part in (of_queries, of_keys))
        self.columns = next(part.shape[2] for part in (self.of_queries, self.of_keys) if part is not None)
        self.row_of = row_of.astype(np.int32)


def _as_columns(rows: Floats) -> Floats:
    """[heads, rows, size] → [heads, size, columns], both in whole registers. Their number is odd for `columns`, so that
    rows of a table of a power of two are not all in the same sets of the cache."""
    registers = -(-rows.shape[1] // lanes())
    columns = lanes() * (registers + (registers % 2 == 0))
    padding = (0, 0), (0, -rows.shape[2] % lanes()), (0, columns - rows.shape[1])
    return np.ascontiguousarray(np.pad(rows.transpose(0, 2, 1), padding))


def attend_by_distance(qkv: Floats, group: Group, heads: int, rows: DistanceRows, context: Floats) -> None:
    """Attends as `attend` does, with scores that have parts by distance (DeBERTa)."""
    start, sequences, length, keys, *_ = group
    _kernels().attend_by_distance(
        _address(qkv),
        start,
        sequences,
        length,
        keys or length,
        heads,
        context.shape[1] // heads,
        _address(context),
        _address(rows.of_queries),
        _address(rows.of_keys),
        rows.columns,
        _address(rows.row_of),
        _longest(rows.row_of),
        allowed_threads(),
    )


def _kernels() -> ModuleType:
    assert _cpu is not None  # noqa: S101 - callers check instruction_set()
    return _cpu
