"""An architecture's embeddings and layers on packed sequences, in torch, on a CPU.

The hidden states of a batch are one [T, hidden] matrix, so embeddings, linear layers and norms never see padding.
Attention also sees sequences. They come sorted by length, so sequences of equal length lie side by side and are one
batched product [n · heads, L, L].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from embert.engine.encoders.cpu.attention import LENGTH_STEP, DecoderAttention, attention
from embert.engine.encoders.cpu.disentangled import DisentangledAttention, PositionRows
from embert.engine.encoders.cpu.kernels import (
    Activation,
    KernelEmbeddings,
    KernelLayer,
    KernelLinear,
    NormOf,
    can_attend,
    instruction_set,
    int8_linear,
    normalized,
)
from embert.engine.encoders.cpu.linear import (
    AdaptedLinear,
    Additions,
    Linear,
    chosen_adapters,
    make_linear,
)
from embert.engine.encoders.cpu.positions import DistanceBias, Positions, Rotation
from embert.engine.encoders.cpu.runs import Group, all_threads, threads_for_elements
from embert.engine.encoders.positions import alibi_by_distance, bias_by_distance
from embert.engine.files.safetensors_file import Tensor
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.models.tensor_names import (
    ATTENTION_SUBLAYER_NORM,
    EMBEDDING_PROJECTION,
    FINAL_NORM,
    KEY_NORM,
    POSITION_EMBEDDINGS,
    POSITION_KEY,
    POSITION_QUERY,
    QKV,
    QUERY_NORM,
    RELATIVE_ATTENTION_BIAS,
    RELATIVE_EMBEDDINGS,
    RELATIVE_NORM,
    SUBLAYER_NORM,
    TOKEN_TYPE_EMBEDDINGS,
    WORD_EMBEDDINGS,
)
from embert.engine.quantization.rows import QuantizedWeight, quantized_weight
from embert.engine.weights.checkpoint import PADDING_POSITION, Checkpoint


class Norm:
    """LayerNorm, or RMSNorm. Gamma and beta are float32 always.

    With them in float32, MiniLM-L6 in bfloat16 is 0.65 % off float32 instead of 0.89 % (64 passages), in the same time.
    """

    def __init__(self, config: EncoderConfig, checkpoint: Checkpoint, name: str, *, own_kernels: bool) -> None:
        self._own_kernel = own_kernels
        self._gamma = gamma(config, checkpoint, name)
        self._beta = None if config.rms_norm else stored(checkpoint, f"{name}.bias").float()
        self._epsilon = config.layer_norm_eps

    @property
    def parts(self) -> NormOf | None:
        """Gamma, beta and epsilon of LayerNorm; None for RMSNorm."""
        return None if self._beta is None else (self._gamma, self._beta, self._epsilon)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, columns] → [T, columns]."""
        if self._own_kernel:
            return normalized(x, self._gamma, self._beta, self._epsilon)
        threads_for_elements(x.numel())
        if self._beta is None:
            exact = F.rms_norm(x.float(), x.shape[1:], self._gamma, self._epsilon)
            return exact.to(x.dtype)
        return torch.layer_norm(x, x.shape[1:], self._gamma, self._beta, self._epsilon)


class Layer:
    """Attention and the feed-forward network with their residuals and norms."""

    def __init__(
        self,
        config: EncoderConfig,
        checkpoint: Checkpoint,
        layer: int,
        dtype: torch.dtype,
        *,
        own_kernels: bool,
        int8: bool = False,
    ) -> None:
        """`layer` is the number under which the weights are stored. `int8` quantizes the products.

        `own_kernels` is that of `make_linear`. Raises UnsupportedModel where int8 does not fit a matrix.
        """
        prefix = f"encoder.layer.{layer}."

        def linear(names: Sequence[str], activation: str = "none") -> AdaptedLinear:
            """One product for several linear layers of the same input."""
            scales = [1.0] * len(names)
            if names == QKV:
                # softmax(q·kᵀ / √d): the scale goes into the query's weights.
                scales[0] = 1.0 if config.qk_norm else config.score_scale  # a norm of queries has it otherwise
            biases = [
                stored(checkpoint, f"{prefix}{name}.bias").float() * scale
                for name, scale in zip(names, scales, strict=True)
            ]
            additions = Additions.of(config, checkpoint, [f"{prefix}{name}.weight" for name in names], scales)
            computed = cast("Activation", activation)
            fused = computed if additions is None else "none"
            linear_layer: Linear
            if int8:
                quantized = [
                    _quantize(checkpoint, f"{prefix}{name}.weight", scale)
                    for name, scale in zip(names, scales, strict=True)
                ]
                linear_layer = int8_linear(quantized, torch.cat(biases), fused)
            else:
                weights = [
                    stored(checkpoint, f"{prefix}{name}.weight").float() * scale
                    for name, scale in zip(names, scales, strict=True)
                ]
                weight = torch.cat(weights) if len(weights) > 1 else weights[0]
                linear_layer = make_linear(
                    weight.to(dtype), torch.cat(biases).to(dtype), fused, own_kernels=own_kernels
                )
            return AdaptedLinear(linear_layer, additions, computed)

        def norm(name: str) -> Norm:
            return Norm(config, checkpoint, prefix + name, own_kernels=own_kernels)

        self._heads = config.heads
        own_attention = own_kernels and can_attend(config.head_size)
        self._own_kernels = own_attention and not config.is_decoder and config.disentangled is None
        self._disentangled: DisentangledAttention | None = None
        if config.disentangled is not None:
            rows = _position_rows(config, checkpoint, prefix)
            self._disentangled = DisentangledAttention(config, rows, own_kernels=own_attention)
        self._decoder_attention: DecoderAttention | None = None
        if config.is_decoder:
            norms = None
            if config.qk_norm:
                query, key = (gamma(config, checkpoint, prefix + name) for name in (QUERY_NORM, KEY_NORM))
                norms = query * config.score_scale, key
            self._decoder_attention = DecoderAttention(config, norms)
        self._pre_norm = config.pre_norm
        self._qkv = linear(QKV)
        self._projection = linear(("attention.output.dense",))
        self._gate: AdaptedLinear | None = None
        if config.gated:
            self._gate = linear(("intermediate.gate",), config.activation)
            self._inner = linear(("intermediate.dense",))
        else:
            self._inner = linear(("intermediate.dense",), config.activation)
        self._outer = linear(("output.dense",))
        self._attention_norm = norm("attention.output.LayerNorm") if config.has_attention_norm(layer) else None
        self._norm = norm("output.LayerNorm")
        self._sublayer_norms = [norm(ATTENTION_SUBLAYER_NORM), norm(SUBLAYER_NORM)] if config.sublayer_norms else None
        self._whole = self._as_one() if self._own_kernels else None

    def __call__(
        self,
        x: torch.Tensor,
        groups: Sequence[Group],
        positions: Positions,
        chosen: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, hidden] → [T, hidden], or [n, hidden] with `rows` [n]: after attention no row needs another.

        `chosen` is that of adapters.chosen_adapters.
        """
        if self._whole is not None and rows is None and positions.rotation is None:
            return self._whole(x, groups, positions)
        before = x if self._attention_norm is None or not self._pre_norm else self._attention_norm(x)
        qkv = self._qkv(before, chosen)
        if self._disentangled is not None:
            context = self._disentangled(qkv, groups)
        elif self._decoder_attention is not None:
            context = self._decoder_attention(qkv, groups, positions)
        else:
            context = attention(qkv, groups, self._heads, positions, own_kernels=self._own_kernels)
        if rows is not None:
            context, x = context[rows], x[rows]
            chosen = None if chosen is None else chosen[rows]
        if self._sublayer_norms is not None:
            x = x + self._sublayer_norms[0](self._projection(context, chosen))
            return x + self._sublayer_norms[1](self._outer(self._feed_forward(self._norm(x), chosen), chosen))
        x = self._projection(context, chosen, x)
        if self._pre_norm:
            return self._outer(self._feed_forward(self._norm(x), chosen), chosen, x)
        if self._attention_norm is not None:
            x = self._attention_norm(x)
        return self._norm(self._outer(self._feed_forward(x, chosen), chosen, x))

    def _as_one(self) -> KernelLayer | None:
        """The layer as one kernel, where there is one for its kind."""
        linears = [linear.plain for linear in (self._qkv, self._projection, self._inner, self._outer)]
        norms = [None if norm is None else norm.parts for norm in (self._attention_norm, self._norm)]
        if self._pre_norm or self._gate is not None or None in linears or None in norms:
            return None
        return KernelLayer(cast("Sequence[KernelLinear]", linears), cast("Sequence[NormOf]", norms), self._heads)

    def _feed_forward(self, x: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
        """[T, hidden] → [T, intermediate]."""
        return self._inner(x, chosen, gate=None if self._gate is None else self._gate(x, chosen))


def _quantize(checkpoint: Checkpoint, name: str, scale: float) -> QuantizedWeight:
    """A quantized weight, times `scale`: the integers are those of the stored weight."""
    weight = quantized_weight(checkpoint.float32(name), name)
    return QuantizedWeight(weight.integers, weight.scales * np.float32(scale))


def _position_rows(config: EncoderConfig, checkpoint: Checkpoint, prefix: str) -> PositionRows:
    """Factors of a layer's queries and keys for each row of the table of distances."""
    relative = config.disentangled
    if relative is None:
        return None, None
    table = stored(checkpoint, RELATIVE_EMBEDDINGS).float()
    if relative.norm:
        beta = stored(checkpoint, f"{RELATIVE_NORM}.bias").float()
        table = F.layer_norm(
            table, table.shape[1:], gamma(config, checkpoint, RELATIVE_NORM), beta, config.layer_norm_eps
        )

    def product(name: str) -> torch.Tensor:
        weight, bias = (stored(checkpoint, f"{prefix}{name}.{kind}").float() for kind in ("weight", "bias"))
        return F.linear(table, weight, bias)

    key, query = QKV[1::-1] if relative.shared else (POSITION_KEY, POSITION_QUERY)
    return (
        product(key) if relative.content_to_position else None,
        product(query) * config.score_scale if relative.position_to_content else None,
    )


def gamma(config: EncoderConfig, checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Factors of a norm: float32 [columns]."""
    return stored(checkpoint, f"{name}.weight").float() + config.norm_offset


def as_torch(stored: Tensor) -> torch.Tensor:
    """A stored tensor as torch sees it: a view of the mapped file."""
    tensor = torch.from_numpy(stored.array)
    return tensor.view(torch.bfloat16) if stored.dtype == "BF16" else tensor


def stored(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A tensor of the encoder, in its stored type."""
    return as_torch(checkpoint.stored(name))


class Transformer:
    """The embeddings and layers of one model, in one dtype. With `int8`, products of layers are int8."""

    def __init__(
        self,
        config: EncoderConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        *,
        int8: bool = False,
        portable: bool = False,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self.own_kernels = own_kernels = dtype == torch.float32 and not portable and instruction_set() is not None
        self._embeddings = _Embeddings(config, checkpoint, dtype, own_kernels=own_kernels)
        self._positions = _positions_of_layers(config, checkpoint, dtype)
        numbers = [config.stored_layer(layer) for layer in range(config.layers)]
        distinct = {
            n: Layer(config, checkpoint, n, dtype, own_kernels=own_kernels, int8=int8) for n in dict.fromkeys(numbers)
        }
        self._layers = [distinct[n] for n in numbers]
        self._final_norm = Norm(config, checkpoint, FINAL_NORM, own_kernels=own_kernels) if config.pre_norm else None

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
        adapters: torch.Tensor | None,
        groups: Sequence[Group],
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The last hidden state [T, hidden], in the layers' dtype; with `rows` [n], only those rows: [n, hidden].

        `ids`, `positions`, `token_types` and `adapters` are int64 [T], `rows` is int64 [n]. `groups` cover all T tokens
        in order. `adapters` are numbers of those of the model, -1 for none; None: no token has one.
        """
        chosen = None if adapters is None else chosen_adapters(adapters, self._config)
        x = self._embeddings(ids, positions, token_types, chosen)
        *first, last = zip(self._layers, self._positions, strict=True)
        for layer, known in first:
            x = layer(x, groups, known, chosen)
        x = last[0](x, groups, last[1], chosen, rows)
        x = x if self._final_norm is None else self._final_norm(x)
        all_threads()
        return x


class _Embeddings:
    """The rows of the tables, their sum's norm, and the projection where there is one."""

    def __init__(self, config: EncoderConfig, checkpoint: Checkpoint, dtype: torch.dtype, *, own_kernels: bool) -> None:
        self._dtype = dtype
        self._words = stored(checkpoint, WORD_EMBEDDINGS)
        self._types = stored(checkpoint, TOKEN_TYPE_EMBEDDINGS).float()
        self._added_words = Additions.of(config, checkpoint, [WORD_EMBEDDINGS])
        self._added_types = Additions.of(config, checkpoint, [TOKEN_TYPE_EMBEDDINGS])
        # Nearly every batch has token type 0 throughout, so the table of positions includes that row. Other types add
        # their difference to it.
        self._positions: torch.Tensor | None = None
        if config.position_table:
            positions = stored(checkpoint, POSITION_EMBEDDINGS).float()
            if config.padding_id is not None:  # the row after those of sequences
                positions = torch.cat([positions, stored(checkpoint, PADDING_POSITION).float()])
            self._positions = positions + self._types[0]
        # Scaled as HuggingFace scales: the factor is rounded to the dtype.
        self._scale = torch.tensor(config.embedding_scale).to(dtype).item()
        self._norm = (
            Norm(config, checkpoint, "embeddings.LayerNorm", own_kernels=own_kernels) if config.embedding_norm else None
        )
        self._projects_first = config.projects_first
        self._plain: KernelEmbeddings | None = None  # for batches without other types and adapters
        norm = None if self._norm is None or self._scale != 1 or self._projects_first else self._norm.parts
        if own_kernels and self._words.dtype == torch.float32 and self._positions is not None and norm:
            self._plain = KernelEmbeddings(self._words, self._positions, norm)
        self._projection: Linear | None = None
        if config.embedding_size is not None:
            weight, bias = (
                stored(checkpoint, f"{EMBEDDING_PROJECTION}.{kind}").to(dtype) for kind in ("weight", "bias")
            )
            self._projection = make_linear(weight, bias, own_kernels=own_kernels)

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor | None,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """int64 [T] each → [T, hidden], in the layers' dtype. `chosen` is that of adapters.chosen_adapters."""
        if self._plain is not None and token_types is None and chosen is None:
            x = self._plain(ids, positions)
            return x if self._projection is None else self._projection(x)
        threads_for_elements(len(ids) * self._words.shape[1])
        x = F.embedding(ids, self._words).float()
        if self._scale != 1:
            x *= self._scale
        x += self._types[0] if self._positions is None else F.embedding(positions, self._positions)
        if token_types is not None:
            x += F.embedding(token_types, self._types) - self._types[0]
        if chosen is not None and self._added_words is not None:
            x += self._added_words.of_table(ids, chosen)
        if chosen is not None and self._added_types is not None:
            x += self._added_types.of_table(torch.zeros_like(ids) if token_types is None else token_types, chosen)
        if self._projects_first and self._projection is not None and self._norm is not None:
            return self._norm(self._projection(x.to(self._dtype)))
        x = (x if self._norm is None else self._norm(x)).to(self._dtype)
        return x if self._projection is None else self._projection(x)


def _positions_of_layers(config: EncoderConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> list[Positions]:
    """The positions of each layer. Layers with the same kind of attention share them."""
    longest = -(-config.max_positions // LENGTH_STEP) * LENGTH_STEP  # attention pads to such lengths
    bias: DistanceBias | None = None
    if config.relative_buckets:
        weight = stored(checkpoint, RELATIVE_ATTENTION_BIAS).float().numpy()
        bias = DistanceBias(bias_by_distance(weight, longest), dtype)
    elif config.alibi:
        bias = DistanceBias(alibi_by_distance(config.heads, longest), dtype)
    kinds = [config.attention_of(layer) for layer in range(config.layers)]
    rotations = {kind.rotary: Rotation(kind.rotary, config.max_positions) for kind in kinds if kind.rotary}
    positions = {
        kind: Positions(rotations[kind.rotary] if kind.rotary else None, bias, kind.window)
        for kind in dict.fromkeys(kinds)
    }
    return [positions[kind] for kind in kinds]
