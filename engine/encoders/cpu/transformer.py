"""An architecture's embeddings and layers on packed sequences, in torch, on a CPU.

The hidden states of a batch are one [T, hidden] matrix, so embeddings, linear layers and norms never see padding.
Attention also sees sequences. They come sorted by length, so sequences of equal length lie side by side and are one
batched product [n · heads, L, L].

Where kernels are made for a number of rows, the matrix has a few more rows than tokens: see linear.kernel_rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from embert.engine.encoders.cpu.adapters import Additions, chosen_adapters
from embert.engine.encoders.cpu.attention import LENGTH_STEP, SHORT_LENGTH, attention
from embert.engine.encoders.cpu.kernels import Activation, EmbeddingsAvx512
from embert.engine.encoders.cpu.layer import Layer, Norm, stored
from embert.engine.encoders.cpu.linear import Linear, Products, choose_products, kernel_rows, make_linear
from embert.engine.encoders.cpu.positions import DistanceBias, Positions, Rotation
from embert.engine.encoders.cpu.runs import Group
from embert.engine.encoders.cpu.threads import all_threads, threads_for_elements
from embert.engine.encoders.positions import alibi_by_distance, bias_by_distance
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.models.tensor_names import (
    EMBEDDING_PROJECTION,
    FINAL_NORM,
    POSITION_EMBEDDINGS,
    RELATIVE_ATTENTION_BIAS,
    TOKEN_TYPE_EMBEDDINGS,
    WORD_EMBEDDINGS,
)
from embert.engine.weights.checkpoint import PADDING_POSITION, Checkpoint

__all__ = ["Transformer"]


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
        weight = stored(checkpoint, "encoder.layer.0.intermediate.dense.weight").to(dtype)
        bias = stored(checkpoint, "encoder.layer.0.intermediate.dense.bias").to(dtype)
        activation = cast("Activation", config.activation)
        self.products = choose_products(weight, bias, activation, portable=portable)
        self._rounds = self.products == "packed"  # rows are rounded up to numbers that kernels are made for
        self._embeddings = _Embeddings(config, checkpoint, dtype, products=self.products)
        self._positions = _positions_of_layers(config, checkpoint, dtype)
        numbers = [config.stored_layer(layer) for layer in range(config.layers)]
        distinct = {
            n: Layer(config, checkpoint, n, dtype, products=self.products, int8=int8) for n in dict.fromkeys(numbers)
        }
        self._layers = [distinct[n] for n in numbers]
        self._final_norm = Norm(config, checkpoint, FINAL_NORM, self.products) if config.pre_norm else None

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
        tokens = len(ids)
        chosen = None if adapters is None else chosen_adapters(adapters, self._config)
        if self._rounds and (spare := kernel_rows(tokens) - tokens):
            ids, positions = F.pad(ids, (0, spare)), F.pad(positions, (0, spare))
            token_types = None if token_types is None else F.pad(token_types, (0, spare))
            chosen = None if chosen is None else F.pad(chosen, (0, 0, 0, spare))
        x = self._embeddings(ids, positions, token_types, chosen)
        *first, last = zip(self._layers, self._positions, strict=True)
        for layer, known in first:
            x = layer(x, groups, known, chosen)
        row_count = tokens if rows is None else len(rows)
        if rows is not None and self._rounds:
            rows = F.pad(rows, (0, kernel_rows(row_count) - row_count))
        x = last[0](x, groups, last[1], chosen, rows)[:row_count]
        x = x if self._final_norm is None else self._final_norm(x)
        all_threads()
        return x

    @torch.inference_mode()
    def prepare(self, rows: int) -> None:
        """Make the kernels for products of so many rows. All layers share them."""
        self._embeddings.prepare(rows)
        x = torch.zeros(rows, self._config.hidden_size, dtype=self._dtype)
        self._layers[0](x, (), self._positions[0])
        all_threads()

    @torch.inference_mode()
    def prepare_attention(self, longest: int) -> None:
        """Make attention's kernels for sequences of up to `longest` tokens. In float32 attention needs none."""
        if self._dtype == torch.float32:
            return
        for length in range(SHORT_LENGTH + 1, longest + 1, LENGTH_STEP):
            qkv = torch.zeros(length, 3 * self._config.hidden_size, dtype=self._dtype)
            for positions in dict.fromkeys(self._positions):
                attention(qkv, [Group(0, 1, length)], self._config.heads, positions)


class _Embeddings:
    """The rows of the tables, their sum's norm, and the projection where there is one."""

    def __init__(
        self, config: EncoderConfig, checkpoint: Checkpoint, dtype: torch.dtype, *, products: Products
    ) -> None:
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
        self._norm = Norm(config, checkpoint, "embeddings.LayerNorm", products)
        self._plain: EmbeddingsAvx512 | None = None  # for batches without other types and adapters
        norm = self._norm.parts
        if products == "avx512" and self._words.dtype == torch.float32 and self._positions is not None and norm:
            self._plain = EmbeddingsAvx512(self._words, self._positions, norm)
        self._projection: Linear | None = None
        if config.embedding_size is not None:
            weight, bias = (
                stored(checkpoint, f"{EMBEDDING_PROJECTION}.{kind}").to(dtype) for kind in ("weight", "bias")
            )
            self._projection = make_linear(weight, bias, products=products)

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
        x += self._types[0] if self._positions is None else F.embedding(positions, self._positions)
        if token_types is not None:
            x += F.embedding(token_types, self._types) - self._types[0]
        if chosen is not None and self._added_words is not None:
            x += self._added_words.of_table(ids, chosen)
        if chosen is not None and self._added_types is not None:
            x += self._added_types.of_table(torch.zeros_like(ids) if token_types is None else token_types, chosen)
        x = self._norm(x).to(self._dtype)
        return x if self._projection is None else self._projection(x)

    def prepare(self, rows: int) -> None:
        """Make the projection's kernel for so many rows."""
        if self._projection is not None:
            self._projection(torch.zeros(rows, self._words.shape[1], dtype=self._dtype))


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
