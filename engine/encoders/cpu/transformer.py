"""An architecture's embeddings and layers on packed sequences, on a CPU.

The hidden states of a batch are one [T, hidden] matrix, so embeddings, linear layers and norms never see padding.
Attention also sees sequences. They come sorted by length, so sequences of equal length lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from embert.engine.encoders.cpu.adapters import additions, mask_columns, select_adapters
from embert.engine.encoders.cpu.experts import RoutedFeedForward
from embert.engine.encoders.cpu.kernels import Activation, Norm
from embert.engine.encoders.cpu.operators import HeadParts, Operators, Weight
from embert.engine.encoders.cpu.positions import Positions, positions_of_layers
from embert.engine.encoders.cpu.runs import Group
from embert.engine.files.safetensors_file import Tensor
from embert.engine.heads.embedding import LayerNorm
from embert.engine.models import tensor_names as tn
from embert.engine.models.encoder_config import EncoderConfig, LongQueries
from embert.engine.weights.adapters import LowRank
from embert.engine.weights.checkpoint import PADDING_POSITION, Checkpoint

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class Layer:
    """Attention or a convolution, and the feed-forward network, with their residuals and norms."""

    def __init__(self, config: EncoderConfig, checkpoint: Checkpoint, layer: int, operators: Operators) -> None:
        """`layer` is the number under which the weights are stored. Raises UnsupportedModel: see Operators.linear."""
        prefix, config = f"encoder.layer.{layer}.", config.of_layer(layer)

        def linear(names: Sequence[str], activation: str = "none") -> Any:
            """Makes one product of several linear layers with the same input."""
            scales = [1.0] * len(names)
            if names == tn.QKV:
                # softmax(q·kᵀ / √d): the scale goes into the query's weights.
                scales[0] = 1.0 if config.qk_norm else config.score_scale  # a norm of queries has it otherwise
            weights, biases = [], []
            for name, scale in zip(names, scales, strict=True):
                weights.append(Weight(f"{prefix}{name}.weight", checkpoint.float32(f"{prefix}{name}.weight"), scale))
                biases.append(checkpoint.float32(f"{prefix}{name}.bias") * np.float32(scale))
            added = additions(config, checkpoint, [weight.name for weight in weights], scales)
            return operators.linear(weights, np.concatenate(biases), cast("Activation", activation), added)

        def norm(name: str) -> Norm:
            return read_norm(config, checkpoint, prefix + name)

        self._pre_norm = config.pre_norm
        self._long_queries = None
        if config.long_queries is not None and config.max_positions > config.long_queries.trained:
            self._long_queries = _LongQueries(config, config.long_queries, operators)
        convolution = config.attention_of(layer).convolution
        if convolution is None:
            self._qkv = linear(tn.QKV)
            self._attention = operators.attention(config, _head_parts(config, checkpoint, prefix))
        else:
            self._qkv = linear((tn.CONVOLUTION_IN,))
            taps = checkpoint.float32(f"{prefix}{tn.CONVOLUTION_TAPS}.weight")[:, 0].T.copy()
            bias, unseen = (
                checkpoint.float32(f"{prefix}{name}.bias") for name in (tn.CONVOLUTION_TAPS, tn.CONVOLUTION_IN)
            )
            self._attention = operators.convolution(taps, bias, unseen, convolution.after)
        self._projection = linear(("attention.output.dense" if convolution is None else tn.CONVOLUTION_OUT,))
        experts = config.experts_of(layer)
        self._feed_forward: FeedForward | RoutedFeedForward
        if experts is not None:
            self._feed_forward = RoutedFeedForward(config, experts, checkpoint, prefix, operators)
        else:
            gate = linear(("intermediate.gate",), config.activation) if config.gated else None
            inner = linear(("intermediate.dense",), "none" if config.gated else config.activation)
            self._feed_forward = FeedForward(gate, inner, linear(("output.dense",)))
        first = norm("attention.output.LayerNorm") if config.has_attention_norm(layer) else None
        second = norm("output.LayerNorm")
        self._attention_norm = None if first is None else operators.norm(first)
        self._norm = operators.norm(second)
        self._sublayer_norms: list[Callable[[Any], Any]] | None = None
        if config.sublayer_norms:
            self._sublayer_norms = [
                operators.norm(norm(name)) for name in (tn.ATTENTION_SUBLAYER_NORM, tn.SUBLAYER_NORM)
            ]
        self._input = _LayerInput(config, checkpoint, layer, operators, linear) if config.layer_inputs else None
        self._whole = None
        if first is not None and isinstance(self._feed_forward, FeedForward):
            linears = self._qkv, self._projection, self._feed_forward.inner, self._feed_forward.outer
            self._whole = operators.whole_layer(config, linears, (first, second))

    def __call__(
        self,
        x: Any,
        groups: Sequence[Group],
        positions: Positions,
        adapter_mask: Floats | None = None,
        rows: Ints | None = None,
        embedded: Any = None,
    ) -> Any:
        """[T, hidden] → [T, hidden], or [n, hidden] with `rows` [n]: after attention no row needs another.

        `adapter_mask` is that of adapters.select_adapters. `embedded` is the first layer's `x`.
        """
        if self._whole is not None and rows is None and positions.rotation is None:
            return self._whole(x, groups, positions)
        before = x if self._attention_norm is None or not self._pre_norm else self._attention_norm(x)
        qkv = self._qkv(before, adapter_mask)
        if self._long_queries is not None:
            self._long_queries(qkv, groups)
        context = self._attention(qkv, groups, positions)
        if rows is not None:
            context, x = context[rows], x[rows]
            adapter_mask = None if adapter_mask is None else adapter_mask[rows]
        if self._sublayer_norms is not None:
            x = x + self._sublayer_norms[0](self._projection(context, adapter_mask))
            x = x + self._sublayer_norms[1](self._feed_forward(self._norm(x), adapter_mask, None))
            if self._input is None:
                return x
            return self._input(x, embedded if rows is None else embedded[rows], adapter_mask)
        x = self._projection(context, adapter_mask, x)
        if self._pre_norm:
            return self._feed_forward(self._norm(x), adapter_mask, x)
        if self._attention_norm is not None:
            x = self._attention_norm(x)
        return self._norm(self._feed_forward(x, adapter_mask, x))


class FeedForward(NamedTuple):
    """outer(inner(x)), or with a gate outer(gate(x) · inner(x))."""

    gate: Any
    inner: Any
    outer: Any

    def __call__(self, x: Any, adapter_mask: Floats | None, residual: Any) -> Any:
        """[T, hidden] → [T, hidden], with `residual` added; None adds nothing."""
        gate = None if self.gate is None else self.gate(x, adapter_mask)
        return self.outer(self.inner(x, adapter_mask, None, gate), adapter_mask, residual)


class _LongQueries:
    """Multiplies the queries of a text's later tokens, before they are rotated."""

    def __init__(self, config: EncoderConfig, scaling: LongQueries, operators: Operators) -> None:
        self._trained, self._columns = scaling.trained, config.heads * config.head_size
        steps = np.arange(config.max_positions, dtype=np.int64) // scaling.trained
        factors = 1 + np.float32(scaling.beta) * np.log1p(steps.astype(np.float32))
        self._factors = operators.enter(factors.astype(np.float32)[:, None])

    def __call__(self, qkv: Any, groups: Sequence[Group]) -> None:
        for group in groups:
            whole = group.prefix + group.length
            if whole > self._trained:
                end = group.start + group.sequences * group.length
                rows = qkv[group.start : end].reshape(group.sequences, group.length, -1)
                rows[:, :, : self._columns] *= self._factors[group.prefix : whole]


class _LayerInput:
    """The part of a layer that its own input gates, with its residual and norm, and the factor of the layer's result.

    Each layer makes its input of the embeddings when it needs it: those of all layers would take much memory.
    """

    def __init__(
        self,
        config: EncoderConfig,
        checkpoint: Checkpoint,
        layer: int,
        operators: Operators,
        linear: Callable[..., Any],
    ) -> None:
        """`linear` makes the products of a layer."""
        prefix, columns = f"encoder.layer.{layer}.", config.layer_inputs
        own = slice(layer * columns, (layer + 1) * columns)
        weight, bias = (checkpoint.float32(f"{tn.LAYER_INPUTS}.{part}")[own] for part in ("weight", "bias"))
        scale = np.float32(config.hidden_size**-0.5)
        self._projection = operators.projection(weight * scale, bias * scale)
        self._projection_norm = operators.norm(read_norm(config, checkpoint, tn.LAYER_INPUTS_NORM))
        self._gate, self._dense = linear((tn.INPUT_GATE,), config.activation), linear((tn.INPUT_DENSE,))
        self._norm = operators.norm(read_norm(config, checkpoint, prefix + tn.INPUT_NORM))
        self._scale = float(checkpoint.float32(prefix + tn.LAYER_SCALE)[0])

    def __call__(self, x: Any, embedded: Any, adapter_mask: Floats | None) -> Any:
        """[T, hidden] each → [T, hidden]."""
        product = self._gate(x, adapter_mask, None, self._projection_norm(self._projection(embedded)))
        return (x + self._norm(self._dense(product, adapter_mask))) * self._scale


def _head_parts(config: EncoderConfig, checkpoint: Checkpoint, prefix: str) -> HeadParts:
    """Norms of queries, keys and values, or the factors of DeBERTa's for each row of its table of distances."""
    if config.qk_norm:
        gammas = [read_norm(config, checkpoint, prefix + name)[0] for name in (tn.QUERY_NORM, tn.KEY_NORM)]
        values = (np.ones(config.head_size, np.float32),) if config.value_norm else ()
        return HeadParts((gammas[0] * np.float32(config.score_scale), gammas[1], *values))
    relative = config.disentangled
    if relative is None:
        return HeadParts()
    table = checkpoint.float32(tn.RELATIVE_EMBEDDINGS)
    if relative.norm:
        gamma, beta = (checkpoint.float32(f"{tn.RELATIVE_NORM}.{part}") for part in ("weight", "bias"))
        table = LayerNorm(gamma, beta, config.layer_norm_eps)(table)

    def product(name: str, scale: float = 1.0) -> Floats:
        weight, bias = (checkpoint.float32(f"{prefix}{name}.{kind}") for kind in ("weight", "bias"))
        rows: Floats = (table @ weight.T + bias) * np.float32(scale)
        return rows

    key, query = tn.QKV[1::-1] if relative.shared else (tn.POSITION_KEY, tn.POSITION_QUERY)
    of_queries = product(key) if relative.content_to_position else None
    return HeadParts(
        distances=(of_queries, product(query, config.score_scale) if relative.position_to_content else None)
    )


def read_norm(config: EncoderConfig, checkpoint: Checkpoint, name: str) -> Norm:
    """LayerNorm, or RMSNorm. Gamma and beta are float32 always.

    With them in float32, MiniLM-L6 in bfloat16 is 0.65 % off float32 instead of 0.89 % (64 passages), in the same time.
    """
    gamma = checkpoint.float32(f"{name}.weight") + np.float32(config.norm_offset)
    return gamma, None if config.rms_norm else checkpoint.float32(f"{name}.bias"), config.layer_norm_eps


class Transformer:
    """The embeddings and layers of one model."""

    def __init__(self, config: EncoderConfig, checkpoint: Checkpoint, operators: Operators) -> None:
        self._config, self._operators = config, operators
        self._embeddings = _Embeddings(config, checkpoint, operators)
        self._positions = positions_of_layers(config, checkpoint)
        numbers = [config.stored_layer(layer) for layer in range(config.layers)]
        distinct = {n: Layer(config, checkpoint, n, operators) for n in dict.fromkeys(numbers)}
        self._layers = [distinct[n] for n in numbers]
        self._final_norm = operators.norm(read_norm(config, checkpoint, tn.FINAL_NORM)) if config.pre_norm else None

    def __call__(
        self,
        ids: Ints,
        positions: Ints,
        token_types: Ints | None,
        adapters: Ints | None,
        groups: Sequence[Group],
        rows: Ints | None = None,
    ) -> Floats:
        """The last hidden state, float32 [T, hidden]; with `rows` [n], only those rows: [n, hidden].

        `ids`, `positions`, `token_types` and `adapters` are [T]. `groups` cover all T tokens in order. `adapters` are
        numbers of those of the model, -1 for none; None: no token has one. Raises IndexError for an id that is not in
        its table.
        """
        adapter_mask = None if adapters is None else select_adapters(adapters, self._config)
        x = embedded = self._embeddings(ids, positions, token_types, adapter_mask)
        *first, last = zip(self._layers, self._positions, strict=True)
        for layer, known in first:
            x = layer(x, groups, known, adapter_mask, None, embedded)
        x = last[0](x, groups, last[1], adapter_mask, rows, embedded)
        return self._operators.leave(x if self._final_norm is None else self._final_norm(x))


class _Embeddings:
    """The rows of the tables, their sum's norm, and the projection where there is one."""

    def __init__(self, config: EncoderConfig, checkpoint: Checkpoint, operators: Operators) -> None:
        self._operators = operators
        self._words = checkpoint.stored(tn.WORD_EMBEDDINGS)
        self._types = checkpoint.float32(tn.TOKEN_TYPE_EMBEDDINGS)
        added = [additions(config, checkpoint, [name]) for name in (tn.WORD_EMBEDDINGS, tn.TOKEN_TYPE_EMBEDDINGS)]
        self._added = [None if each is None else _AddedRows(each, operators) for each in added]
        # Nearly every batch has token type 0 throughout, so the table of positions includes that row. Other types add
        # their difference to it.
        self._positions: Floats | None = None
        if config.position_table:
            positions = checkpoint.float32(tn.POSITION_EMBEDDINGS)
            if config.padding_id is not None:  # the row after those of sequences
                positions = np.concatenate([positions, checkpoint.float32(PADDING_POSITION)])
            self._positions = positions + self._types[0]
        # Scaled as HuggingFace scales: the factor is rounded to the dtype.
        factor = np.array([config.embedding_scale], np.float32)
        self._scale = operators.leave(operators.to_dtype(operators.enter(factor)))[0]
        norm = read_norm(config, checkpoint, "embeddings.LayerNorm") if config.embedding_norm else None
        self._norm = None if norm is None else operators.norm(norm)
        self._projects_first = config.projects_first
        self._plain: Callable[[Ints, Ints], Any] | None = None  # for batches without other types and adapters
        plain = self._words.dtype == "F32" and self._scale == 1 and not self._projects_first
        if plain and norm is not None and self._positions is not None:
            self._plain = operators.embeddings(self._words.array, self._positions, norm)
        self._projection: Callable[[Any], Any] | None = None
        if config.embedding_size is not None:
            weight, bias = (checkpoint.float32(f"{tn.EMBEDDING_PROJECTION}.{kind}") for kind in ("weight", "bias"))
            self._projection = operators.projection(weight, bias)

    def __call__(self, ids: Ints, positions: Ints, token_types: Ints | None, adapter_mask: Floats | None) -> Any:
        """[T] each → [T, hidden], in the layers' dtype. `adapter_mask` is that of adapters.select_adapters."""
        if self._plain is not None and token_types is None and adapter_mask is None:
            x = self._plain(ids, positions)
            return x if self._projection is None else self._projection(x)
        if min(each.min(initial=0) for each in (ids, positions, token_types) if each is not None) < 0:
            raise IndexError("an id, a position or a token type is negative")
        rows = Tensor(self._words.array[ids], self._words.dtype).float32()
        if self._scale != 1:
            rows = rows * self._scale
        rows = rows + (self._types[0] if self._positions is None else self._positions[positions])
        if token_types is not None:
            rows += self._types[token_types] - self._types[0]
        if adapter_mask is not None:
            for added, numbers in zip(self._added, (ids, token_types), strict=True):
                if added is not None:
                    rows += added(np.zeros_like(ids) if numbers is None else numbers, adapter_mask)
        x = self._operators.enter(rows)
        if self._projects_first and self._projection is not None and self._norm is not None:
            return self._norm(self._projection(self._operators.to_dtype(x)))
        x = self._operators.to_dtype(x if self._norm is None else self._norm(x))
        return x if self._projection is None else self._projection(x)


class _AddedRows:
    """The adapters' additions to the rows of a table."""

    def __init__(self, added: LowRank, operators: Operators) -> None:
        self._left = added.left
        self._product = operators.head_linear(added.right.T, None, "identity")

    def __call__(self, numbers: Ints, adapter_mask: Floats) -> Floats:
        """float32 [T, columns] for rows of the table [T]."""
        return self._product(mask_columns(self._left[numbers], adapter_mask))
