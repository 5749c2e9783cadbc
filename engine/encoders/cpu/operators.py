"""Operators of a transformer: our kernels on numpy's arrays. encoders/torch/ has the same operators in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from embert.engine.encoders.cpu import kernels
from embert.engine.encoders.cpu.adapters import mask_columns
from embert.engine.encoders.cpu.kernels import Activation, KernelLayer, KernelLinear, Norm
from embert.engine.encoders.cpu.positions import Positions
from embert.engine.encoders.cpu.runs import Group
from embert.engine.encoders.positions import relative_rows
from embert.engine.heads.embedding import ACTIVATIONS
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.quantization.rows import QuantizedWeight, quantize_weight
from embert.engine.weights.adapters import LowRank

Floats = npt.NDArray[np.float32]

# Activations of heads that a product includes; the others follow it.
FUSED: dict[str, Activation] = {
    "identity": "none", "relu": "relu", "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh",
}  # fmt: skip


class Weight(NamedTuple):
    """Weight of a product. Several weights may have the same input."""

    name: str
    weight: Floats  # [out, in]
    scale: float


class HeadParts(NamedTuple):
    """Inputs of a layer's attention in addition to queries, keys and values."""

    norms: tuple[Floats, ...] | None = None  # gammas of RMSNorms: of queries, with the scores' scale, keys and values
    # Factors of queries and of keys for each row of the table of distances: [2 · span, hidden] each.
    distances: tuple[Floats | None, Floats | None] | None = None


class Operators(Protocol):
    """Makes the operators of layers. Rows between them are its own arrays, in its own dtype."""

    def enter(self, x: Floats) -> Any:
        """Converts float32 rows to an array of the operators' own."""
        ...

    def to_dtype(self, x: Any) -> Any:
        """Converts rows to the dtype of layers."""
        ...

    def leave(self, x: Any) -> Floats:
        """Rows of layers for numpy, contiguous."""
        ...

    def linear(self, weights: Sequence[Weight], bias: Floats, activation: Activation, added: LowRank | None) -> Any:
        """A layer's product: activation(x · weightsᵀ + bias + added + residual) · gate.

        It is called with (x, adapter_mask, residual, gate). Raises UnsupportedModel where int8 does not fit a weight.
        """
        ...

    def projection(self, weight: Floats, bias: Floats) -> Any:
        """A product outside of layers."""
        ...

    def norm(self, norm: Norm) -> Callable[[Any], Any]:
        """LayerNorm or RMSNorm of rows."""
        ...

    def attention(self, config: EncoderConfig, parts: HeadParts) -> Callable[[Any, Sequence[Group], Positions], Any]:
        """Attention: [T, (heads + 2 · kv_heads) · size] → [T, heads · size]. Queries without norms are scaled."""
        ...

    def convolution(
        self, taps: Floats, bias: Floats, unseen: Floats, after: int
    ) -> Callable[[Any, Sequence[Group], Positions], Any]:
        """A gated convolution: [T, 3 · columns] → [T, columns]. `taps` are [taps, columns], `after` of later rows.

        Rows that are not attended to have `unseen` [3 · columns] as inputs.
        """
        ...

    def whole_layer(
        self, config: EncoderConfig, linears: Sequence[Any], norms: Sequence[Norm], /
    ) -> Callable[[Any, Sequence[Group], Positions], Any] | None:
        """A layer of four products without adapters in one call, where there is one for it."""
        ...

    def embeddings(self, words: Floats, positions: Floats, norm: Norm, /) -> Callable[..., Any] | None:
        """Sums of the rows of two tables with their norm in one call, where there is one for them."""
        ...

    def head_linear(self, weight: Floats, bias: Floats | None, activation: str) -> Callable[[Floats], Floats]:
        """activation(x · weightᵀ + bias) on numpy's arrays in float32; the activation is one of ACTIVATIONS."""
        ...

    def head_norm(self, norm: Norm) -> Callable[[Floats], Floats]:
        """LayerNorm on numpy's arrays."""
        ...

    def means(self, hidden: Floats, groups: Sequence[Group]) -> Floats:
        """The mean of each sequence's rows: float32 [T, columns] → [n, columns]."""
        ...


class KernelOperators:
    """Operators by our kernels. With `int8`, products of layers are int8."""

    def __init__(self, *, int8: bool = False) -> None:
        self._int8 = int8

    def enter(self, x: Floats) -> Floats:
        return x

    to_dtype = leave = enter

    def linear(
        self, weights: Sequence[Weight], bias: Floats, activation: Activation, added: LowRank | None
    ) -> AdaptedLinear:
        if self._int8:
            linear = kernels.int8_linear([_quantize(each) for each in weights], bias, activation)
        else:
            linear = kernels.linear(stack_weights(weights), bias, activation)
        return AdaptedLinear(linear, activation, added)

    def projection(self, weight: Floats, bias: Floats) -> KernelLinear:
        return kernels.linear(weight, bias)

    def norm(self, norm: Norm) -> Callable[[Floats], Floats]:
        return lambda x: kernels.apply_norm(x, norm)

    head_norm = norm

    def head_linear(self, weight: Floats, bias: Floats | None, activation: str) -> Callable[[Floats], Floats]:
        if activation in FUSED:
            return kernels.linear(weight, bias, FUSED[activation])
        linear, after = kernels.linear(weight, bias), ACTIVATIONS[activation]
        return lambda x: after(linear(x))

    def means(self, hidden: Floats, groups: Sequence[Group]) -> Floats:
        return kernels.means(hidden, groups)

    def attention(self, config: EncoderConfig, parts: HeadParts) -> Attention:
        return Attention(config, parts)

    def convolution(
        self, taps: Floats, bias: Floats, unseen: Floats, after: int
    ) -> Callable[[Floats, Sequence[Group], Positions], Floats]:
        return lambda rows, groups, _: convolve(rows, groups, taps, bias, unseen, after)

    def whole_layer(
        self, config: EncoderConfig, linears: Sequence[AdaptedLinear], norms: Sequence[Norm]
    ) -> KernelLayer | None:
        plain = not (config.gated or config.pre_norm or config.is_decoder or config.disentangled)
        if not plain or config.head_size % kernels.lanes() or any(linear.has_adapters for linear in linears):
            return None
        if any(beta is None for _, beta, _ in norms):
            return None
        return KernelLayer([linear.linear for linear in linears], norms, config.heads)

    def embeddings(self, words: Floats, positions: Floats, norm: Norm) -> kernels.KernelEmbeddings | None:
        return None if norm[1] is None else kernels.KernelEmbeddings(words, positions, norm)


def stack_weights(weights: Sequence[Weight]) -> Floats:
    """Scaled weights one below the other."""
    parts = [part if scale == 1 else part * np.float32(scale) for _, part, scale in weights]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _quantize(part: Weight) -> QuantizedWeight:
    """A quantized weight, times its scale: the integers are those of the stored weight."""
    weight = quantize_weight(part.weight, part.name)
    return QuantizedWeight(weight.integers, weight.scales * np.float32(part.scale))


class AdaptedLinear:
    """A linear layer with an activation, to which adapters may add before it."""

    def __init__(self, linear: KernelLinear, activation: Activation, added: LowRank | None) -> None:
        self.linear, self.has_adapters = linear, added is not None
        if added is not None:
            self._product = KernelLinear(linear.layer, linear.outputs, "none")
            self._right, self._left = kernels.linear(added.right), kernels.linear(added.left, activation=activation)

    def __call__(
        self, x: Floats, adapter_mask: Floats | None, residual: Floats | None = None, gate: Floats | None = None
    ) -> Floats:
        """`adapter_mask` is that of `select_adapters`."""
        if adapter_mask is None or not self.has_adapters:
            return self.linear(x, residual, gate)
        return self._left(mask_columns(self._right(x), adapter_mask), self._product(x, residual), gate)


def convolve(rows: Any, groups: Sequence[Group], taps: Any, bias: Any, unseen: Any, after: int) -> Any:
    """Computes Operators.convolution on numpy's arrays or torch's tensors. May change `rows`.

    The order of each sum depends only on the tap's index, so results are batch-invariant.
    """
    for start, n, length, keys, *_ in groups:
        if keys:
            rows[start : start + n * length].reshape(n, length, -1)[:, keys:] = unseen
    columns = rows.shape[1] // 3
    products = rows[:, :columns] * rows[:, 2 * columns :]
    sums = products * taps[len(taps) - 1 - after] + bias
    for start, n, length, *_ in groups:
        x, y = (each[start : start + n * length].reshape(n, length, columns) for each in (products, sums))
        for tap, weights in enumerate(taps):
            back = len(taps) - 1 - after - tap  # rows from the tap's to the sum's
            if 0 < back < length:
                y[:, back:] += x[:, :-back] * weights
            elif 0 < -back < length:
                y[:, :back] += x[:, -back:] * weights
    return sums * rows[:, columns : 2 * columns]


class Attention:
    """Attention of one layer. Heads are padded with zeros to whole registers."""

    def __init__(self, config: EncoderConfig, parts: HeadParts) -> None:
        self._heads, self._kv_heads, self._size = config.heads, config.kv_heads, config.head_size
        self._causal, self._epsilon = config.causal, config.layer_norm_eps
        self._norms, self._rows = parts.norms, None
        if config.disentangled is not None and parts.distances is not None:
            of_queries, of_keys = (
                None if part is None else part.reshape(len(part), self._heads, -1).swapaxes(0, 1)
                for part in parts.distances
            )
            self._rows = kernels.DistanceRows(
                of_queries, of_keys, relative_rows(config.disentangled, config.max_positions)
            )

    def __call__(self, qkv: Floats, groups: Sequence[Group], positions: Positions) -> Floats:
        """Attends within each group. `groups` cover all rows."""
        heads, size, spare = self._heads, self._size, -self._size % kernels.lanes()
        if self._norms is not None:
            first = 0
            for count, gamma in zip((heads, self._kv_heads, self._kv_heads), self._norms, strict=False):
                own = slice(first * size, (first + count) * size)
                rows = kernels.apply_norm(qkv[:, own].reshape(-1, size), (gamma, None, self._epsilon))
                qkv[:, own] = rows.reshape(len(qkv), -1)
                first += count
        if spare:
            qkv = np.pad(qkv.reshape(len(qkv), -1, size), ((0, 0), (0, 0), (0, spare)))
        context = np.empty((len(qkv), heads * (size + spare)), np.float32)
        for group in groups:
            if self._rows is not None:
                kernels.attend_by_distance(qkv, group, heads, self._rows, context)
            else:
                decoder = self._causal, 0 if self._kv_heads == heads else self._kv_heads
                kernels.attend(qkv, group, heads, positions, context, decoder)
        return context.reshape(-1, heads, size + spare)[:, :, :size].reshape(-1, heads * size) if spare else context
