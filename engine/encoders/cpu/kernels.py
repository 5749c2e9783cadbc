"""Our own kernels for CPUs (csrc/cpu/) on torch's tensors, in float32: linear layers, norms, attention.

Results are batch-invariant: the order of each sum depends only on the row's own columns or its own sequence. torch's
operators, which other CPUs use, choose the order by the number of rows.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from embert.engine.encoders.cpu.positions import Positions
from embert.engine.encoders.cpu.runs import Group, allowed_threads
from embert.engine.errors import UnsupportedModel
from embert.engine.quantization.rows import QuantizedWeight

Activation = Literal["none", "gelu", "gelu_tanh", "relu", "silu"]

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


@functools.cache
def _select(limit: str) -> str:
    """Select kernels; return the name of their instruction set, "" if this CPU has no kernels."""
    names = _kernels().instruction_sets()
    if limit and limit not in names:
        raise UnsupportedModel(f"EMBERT_CPU_ISA is {limit!r}; supported: {', '.join(names)}")
    return str(_kernels().select(limit))


def instruction_set() -> str | None:
    """Instruction set of the kernels on this CPU, None if it has no kernels or they are not installed.

    EMBERT_CPU_ISA selects a smaller one, as ONEDNN_MAX_CPU_ISA does for oneDNN.
    """
    return None if _cpu is None else _select(os.environ.get("EMBERT_CPU_ISA", "")) or None


def kernels_name() -> str:
    """Name of the instruction set in the start-up log."""
    return (instruction_set() or "").replace("AVX512", "AVX-512").replace("_", " ").replace("DOT", "dot product")


class KernelLinear:
    """A linear layer, called with tensors: see products.linear.Linear."""

    def __init__(self, layer: Callable[..., None], outputs: int, activation: Activation) -> None:
        """`layer` is one of `_cpu`."""
        self.layer, self.activation, self._outputs = layer, _kernels().activation(activation), outputs

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x.contiguous()
        rows = x.shape[0]
        y = x.new_empty(rows, self._outputs)
        # The names keep copies alive until the kernel has read them.
        residual = None if residual is None else residual.contiguous()
        gate = None if gate is None else gate.contiguous()
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in (residual, gate))
        self.layer(x.data_ptr(), rows, y.data_ptr(), self.activation, *addresses, allowed_threads())
        return y


def linear(weight: torch.Tensor, bias: torch.Tensor, activation: Activation = "none") -> KernelLinear:
    """A linear layer in float32: `weight` is float32 [out, in] and `bias` float32 [out]."""
    layer = _kernels().linear(weight.contiguous().numpy(), bias.contiguous().numpy())
    return KernelLinear(layer, len(bias), activation)


def int8_linear(
    weights: Sequence[QuantizedWeight], bias: torch.Tensor, activation: Activation = "none"
) -> KernelLinear:
    """An int8 linear layer with the integers that quantization/ defines; `weights` are concatenated."""
    integers = np.concatenate([weight.integers for weight in weights])
    scales = np.concatenate([weight.scales for weight in weights])
    return KernelLinear(_kernels().int8_linear(integers, scales, bias.contiguous().numpy()), len(bias), activation)


NormOf = tuple[torch.Tensor, torch.Tensor, float]  # gamma, beta, epsilon


class KernelLayer:
    """A whole layer in one call, where norms follow the residuals and nothing gates: BERT's, and others like it."""

    def __init__(self, linears: Sequence[KernelLinear], norms: Sequence[NormOf], heads: int) -> None:
        """`linears` are those of query, key and value, of the projection, and the inner and the outer one, with their
        activations; `norms` follow attention and the feed-forward network."""
        parts = ((gamma.numpy(), beta.numpy(), epsilon) for gamma, beta, epsilon in norms)
        self._layer = _kernels().Layer(*(linear.layer for linear in linears), linears[2].activation, *parts, heads)

    def __call__(self, x: torch.Tensor, groups: Sequence[Group], positions: Positions) -> torch.Tensor:
        """[T, hidden] → [T, hidden]. `groups` cover all rows in order; positions have no rotation."""
        x = x.contiguous()
        y = torch.empty_like(x)
        bias = positions.bias
        self._layer(
            x.data_ptr(),
            x.shape[0],
            groups,
            *((0, 0) if bias is None else (bias.by_distance.data_ptr(), bias.longest)),
            -1 if positions.window is None else positions.window,
            y.data_ptr(),
            allowed_threads(),
        )
        return y


def normalized(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """LayerNorm, or without `beta` RMSNorm, of float32 [T, columns]."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _kernels().normalize(
        x.data_ptr(),
        *x.shape,
        gamma.data_ptr(),
        0 if beta is None else beta.data_ptr(),
        epsilon,
        y.data_ptr(),
        allowed_threads(),
    )
    return y


class KernelEmbeddings:
    """Rows of two tables, their sums and the sums' norm, in one call."""

    def __init__(self, words: torch.Tensor, positions: torch.Tensor, norm: NormOf) -> None:
        """The tables are float32 [rows, columns]."""
        self._tables = words.contiguous().numpy(), positions.contiguous().numpy()
        self._gamma, self._beta, self._epsilon = norm

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [T] each → float32 [T, columns]. Raises IndexError for an id outside its table."""
        y = torch.empty(len(ids), len(self._gamma))
        _kernels().embed(
            ids.contiguous().data_ptr(),
            positions.contiguous().data_ptr(),
            len(ids),
            *self._tables,
            self._gamma.data_ptr(),
            self._beta.data_ptr(),
            self._epsilon,
            y.data_ptr(),
            allowed_threads(),
        )
        return y


def means(hidden: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
    """The mean of each sequence's rows: float32 [T, columns] → [n, columns]."""
    hidden = hidden.contiguous()
    columns, done = hidden.shape[1], 0
    y = torch.empty(sum(group.sequences for group in groups), columns)
    for start, sequences, length, _ in groups:
        source = hidden.data_ptr() + 4 * start * columns
        _kernels().mean(source, sequences, length, columns, y.data_ptr() + 4 * done * columns, allowed_threads())
        done += sequences
    return y


def can_attend(size: int) -> bool:
    """True if `attend` computes heads of `size` columns: whole registers."""
    return int(size % _kernels().lanes()) == 0


def attend(qkv: torch.Tensor, group: Group, heads: int, positions: Positions, context: torch.Tensor) -> None:
    """Attention of one group of sequences: float32 [T, 3 · hidden] → its rows of `context` [T, hidden], both whole."""
    start, sequences, length, keys = group
    size = context.shape[1] // heads
    rotation = None if positions.rotation is None else positions.rotation(length)  # keeps the tables until the end
    bias = positions.bias
    _kernels().attend(
        qkv.data_ptr(),
        start,
        sequences,
        length,
        keys or length,
        heads,
        size,
        context.data_ptr(),
        *((0, 0, 0) if rotation is None else (rotation[0].data_ptr(), rotation[1].data_ptr(), rotation[0].shape[1])),
        *((0, 0) if bias is None else (bias.by_distance.data_ptr(), bias.longest)),
        -1 if positions.window is None else positions.window,
        allowed_threads(),
    )


def attend_by_distance(qkv: torch.Tensor, group: Group, heads: int, rows: DistanceRows, context: torch.Tensor) -> None:
    """The same with scores that have parts by distance (DeBERTa)."""
    start, sequences, length, keys = group
    tables = (0 if table is None else table.data_ptr() for table in (rows.of_queries, rows.of_keys))
    _kernels().attend_by_distance(
        qkv.data_ptr(),
        start,
        sequences,
        length,
        keys or length,
        heads,
        context.shape[1] // heads,
        context.data_ptr(),
        *tables,
        rows.columns,
        rows.row_of.data_ptr(),
        (len(rows.row_of) + 1) // 2,
        allowed_threads(),
    )


class DistanceRows:
    """Factors of queries and keys for each row of a table of distances, for `attend_by_distance`."""

    def __init__(
        self, of_queries: torch.Tensor | None, of_keys: torch.Tensor | None, row_of: npt.NDArray[np.int64]
    ) -> None:
        """The first two are float32 [heads, rows, size], one of them at least; `row_of` is that of relative_rows."""
        self.of_queries, self.of_keys = (None if part is None else _as_columns(part) for part in (of_queries, of_keys))
        self.columns = next(part.shape[2] for part in (self.of_queries, self.of_keys) if part is not None)
        self.row_of = torch.from_numpy(row_of.astype(np.int32))


def _as_columns(rows: torch.Tensor) -> torch.Tensor:
    """[heads, rows, size] → [heads, size, columns]: an odd number of registers, so that rows of a table of a power of
    two are not all in the same sets of the cache."""
    lanes = _kernels().lanes()
    spare = -rows.shape[1] % lanes
    spare += lanes * ((rows.shape[1] + spare) // lanes % 2 == 0)
    return F.pad(rows.transpose(1, 2), (0, spare)).contiguous()


def _kernels() -> ModuleType:
    assert _cpu is not None  # noqa: S101 - callers check instruction_set()
    return _cpu
